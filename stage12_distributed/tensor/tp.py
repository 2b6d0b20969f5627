"""The command `tp`: the router with servers whose model is split over several ranks."""

from __future__ import annotations

from shared import cli

from . import TIMEOUT

SERVER = "stage12_distributed.tensor.server"
ABOUT = (
    "Stage 12, tensor parallel: servers whose model is split over several processes: each has a "
    "part of every matrix and of the keys and values. A server ends with its ranks; the router in "
    "front of it starts it again, and repeats requests of which the client has seen nothing. All "
    "other options are those of python -m stage12_distributed router."
)
EXAMPLES = """\
  python -m stage12_distributed tp --ranks 2
  python -m stage12_distributed tp --ranks 3 --model gpt2 --port 8080
  python -m stage12_distributed tp --ranks 1 --adapters FOLDER"""


def make_parser(program: str, about: str, examples: str) -> cli.Parser:
    """The options of ranks: of this command, and of the server that it starts."""
    parser = cli.Parser(program, about, examples)
    parser.add_argument(
        "--ranks",
        type=cli.whole_number(1, 64),
        default=2,
        metavar="N",
        help="processes that share the model; each needs a core per thread",
    )
    parser.add_argument(
        "--rank-timeout",
        type=cli.number(0.1, 3600),
        default=TIMEOUT,
        metavar="S",
        help="seconds after which a rank that does not answer is given up: its server ends, and is "
        "started again",
    )
    parser.add_argument(
        "--adapters",
        default="",
        metavar="FOLDER",
        help="folder whose subfolders are LoRA adapters, as PEFT saves them; a request may name "
        "one as its model; default: none",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    options, rest = make_parser("stage12_distributed tp", ABOUT, EXAMPLES).parse_known_args(argv)
    from ..router.app import main as route  # takes a second

    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items()]
    return route(rest, SERVER, arguments, options.ranks, replicas=1)


if __name__ == "__main__":
    cli.run(main)
