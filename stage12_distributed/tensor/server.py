"""Stage 06's server with a model on several ranks: `python -m stage12_distributed.tensor.server`.

It ends with its ranks: when one of them dies or stands still, the process ends at once with status
1, and its clients lose their connections. So run it behind something that starts it again. The
command `tp` does: the router's pool starts the process again, and the router repeats the requests
of which its clients have seen nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from shared import cli
from stage04_continuous.engine import Engine
from stage06_serving.__main__ import main as serve
from stage06_serving.engines import Paged

from .group import RankGroup, RankRunner, Setup, make, whole_model
from .tp import SERVER, make_parser


class Served(Paged):
    """The engine that `make` makes, for stage 06's server."""

    runner: RankRunner

    def __init__(self, engine: Engine) -> None:
        self.runner = engine.runner  # type: ignore[assignment]
        super().__init__(engine)

    @property
    def variants(self) -> Mapping[str, bytes]:
        adapters = self.runner.ranks.model.adapters
        return adapters.names if adapters else {}

    @property
    def health(self) -> str:
        return self.runner.ranks.health


@dataclass(frozen=True)
class Maker:
    """What stage 06's server makes its engine with: `load`, then `make`, then `serve`."""

    ranks: int
    timeout: float
    adapters: str

    make = staticmethod(make)
    serve = staticmethod(Served)

    def load(self, options: argparse.Namespace) -> cli.Loaded:
        """Rank 0's part of the model of `options`, with the other ranks running."""
        if options.threads is None:
            options.threads = max(1, torch.get_num_threads() // self.ranks)
        plain = argparse.Namespace(**{**vars(options), "linear": "plain"})
        loaded = cli.load_model_from(plain)
        load = partial(whole_model, plain)
        setup = Setup(load, self.ranks, self.timeout, options.linear, self.adapters)
        group = RankGroup(setup, loaded.model, on_end=partial(os._exit, 1))
        return replace(loaded, linear=group.linear)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(SERVER, str(__doc__), f"  python -m {SERVER} --ranks 2")
    options, rest = parser.parse_known_args(argv)
    return serve(rest, Maker(options.ranks, options.rank_timeout, options.adapters))


if __name__ == "__main__":
    cli.run(main)
