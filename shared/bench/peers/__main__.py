"""`python -m shared.bench.peers`: see compare.py."""

from shared import cli

from .compare import BENCHMARK

if __name__ == "__main__":
    cli.run(BENCHMARK.main)
