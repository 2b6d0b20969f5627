"""Measures ours and the installed engines: see the package."""

import argparse
from functools import partial

from reports import peers
from shared import cli, kit


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", default="")
    options, rest = parser.parse_known_args(argv)
    rest += ["--quick"] if options.model else []
    measure = partial(peers.measure, model=options.model)
    kit.main("peers", peers.__doc__, measure, peers.tables, rest)


if __name__ == "__main__":
    cli.run(main)
