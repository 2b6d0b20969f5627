"""The command `tp`: stage 06's server with a model on several ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shared import cli

ABOUT = (
    "Stage 12, tensor parallel: stage 06's server with a model split over several processes: each "
    "has a part of every matrix and of the keys and values. All other options are those of "
    "python -m stage06_serving."
)
EXAMPLES = """\
  python -m stage12_distributed tp --ranks 2
  python -m stage12_distributed tp --ranks 3 --model gpt2 --port 8080
  python -m stage12_distributed tp --ranks 1 --adapters FOLDER"""


def whole_model(options: argparse.Namespace) -> Any:
    """The model that the options name, with plain layers: what each rank loads."""
    from stage01_forward import families

    return cli.load_model_from(options, families).model


@dataclass(frozen=True)
class Maker:
    """What stage 06's server makes its engine with: `load`, then `make`, then `serve`."""

    ranks: int
    timeout: float
    adapters: str

    def load(self, options: argparse.Namespace, families: cli.Families) -> cli.Loaded:
        """Rank 0's part of the model of `options`, with the other ranks running."""
        import torch

        from .gang import Gang, Setup

        if options.threads is None:
            options.threads = max(1, torch.get_num_threads() // self.ranks)
        plain = argparse.Namespace(**{**vars(options), "linear": "plain"})
        loaded = cli.load_model_from(plain, families)
        load = partial(whole_model, plain)
        setup = Setup(load, self.ranks, self.timeout, options.linear, self.adapters)
        return replace(loaded, linear=Gang(setup, loaded.model).linear)

    def make(self, model: Any, **options: Any) -> Any:
        from .gang import make

        return make(model, **options)

    def serve(self, engine: Any) -> Any:
        from .gang import Served

        return Served(engine)


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("stage12_distributed tp", ABOUT, EXAMPLES)
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
        default=4.0,
        metavar="S",
        help="seconds after which a rank that has not answered in a pass is killed and all ranks "
        "restart",
    )
    parser.add_argument(
        "--adapters",
        default="",
        metavar="FOLDER",
        help="folder whose subfolders are LoRA adapters, as PEFT saves them; a request may name "
        "one as its model; default: none",
    )
    options, rest = parser.parse_known_args(argv)
    from stage06_serving.__main__ import main as serve  # takes a second

    return serve(rest, Maker(options.ranks, options.rank_timeout, options.adapters))


if __name__ == "__main__":
    cli.run(main)
