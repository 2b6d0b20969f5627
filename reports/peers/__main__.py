"""`python -m reports.peers`: see compare.py."""

from shared import cli

from .compare import BENCHMARK

main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
