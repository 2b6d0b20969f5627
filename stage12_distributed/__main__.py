"""Stage 12 on the command line: `python -m stage12_distributed tp "Once upon a time"`."""

from __future__ import annotations

import sys
from importlib import import_module

from shared import cli

ABOUT = "Stage 12, distributed: one engine on several processes and machines."
COMMANDS = {
    "router": ("router", "routes requests to running servers by prefix"),
    "serve": ("serve", "servers and the router on Ray, here or on a cluster"),
    "tp": ("tensor.tp", "one model on several processes; LoRA adapters"),
}
EXAMPLES = """\
  python -m stage12_distributed tp --ranks 2 "Once upon a time"
  python -m stage12_distributed router --help"""


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = cli.Parser("stage12_distributed", ABOUT, EXAMPLES)
    known = "; ".join(f"{name}: {about}" for name, (_, about) in COMMANDS.items())
    parser.add_argument(
        "command", choices=COMMANDS, metavar="COMMAND", help=f"{known}; each has its own --help"
    )
    command = parser.parse_args(words[:1]).command
    module = import_module(f"{__package__}.{COMMANDS[command][0]}")  # with a function `main`
    status: int = module.main(words[1:])
    return status


if __name__ == "__main__":
    cli.run(main)
