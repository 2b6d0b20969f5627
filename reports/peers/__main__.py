"""Measures ours and the installed engines: see the package."""

from functools import partial

from reports import peers
from shared import cli, kit

if __name__ == "__main__":
    cli.run(partial(kit.main, "peers", peers.__doc__, peers.measure, peers.tables))
