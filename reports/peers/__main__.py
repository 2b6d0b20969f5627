"""Measures ours and the installed engines: see the package."""

from reports import peers
from shared import cli, kit


def main(argv: list[str] | None = None) -> None:
    kit.main(peers.NAME, peers.__doc__, peers.measure, peers.tables, argv, module="reports.peers")


if __name__ == "__main__":
    cli.run(main)
