"""Stage 12 on the command line: `python -m stage12_distributed router --replicas 2`."""

from __future__ import annotations

import sys
from importlib import import_module

from shared import cli

ABOUT = "Stage 12, distributed: one engine on several processes and machines."
COMMANDS = {
    "router": "starts servers and routes requests to them by prefix",
    "serve": "the same replicas on Ray, here or on a cluster",
    "simulate": "runs a fleet's traffic through the real scheduler and policy, in virtual time",
    "timed": "a server of stage 06 that keeps the times of its passes, for `simulate`",
    "disaggregated": "measures prefill and decode in two processes over one pool",
    "tp": "one model on several processes, each with a part of every matrix; LoRA adapters",
}
MODULES = {
    "router": "router.app",
    "serve": "router.serve",
    "simulate": "simulation.simulate",
    "timed": "simulation.timed",
    "disaggregated": "bench.apart",
    "tp": "tensor.tp",
}
EXAMPLES = """\
  python -m stage12_distributed router --replicas 2
  python -m stage12_distributed router --help"""


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = cli.Parser("stage12_distributed", ABOUT, EXAMPLES)
    known = "; ".join(f"{name} {about}" for name, about in COMMANDS.items())
    parser.add_argument(
        "command", choices=COMMANDS, metavar="COMMAND", help=f"{known}; each has its own --help"
    )
    command = parser.parse_args(words[:1]).command
    module = import_module(f"{__package__}.{MODULES[command]}")  # with a function `main`
    status: int = module.main(words[1:])
    return status


if __name__ == "__main__":
    cli.run(main)
