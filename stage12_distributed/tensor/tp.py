"""The command `tp`: continue a text with a model that is split over several ranks."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from shared import cli
from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request

from .group import RankGroup, Setup, make

ABOUT = (
    "Stage 12, tensor parallel: continue a text with a model that is split over several processes: "
    "each has a part of every matrix, and of the keys and values."
)
EXAMPLES = ("--ranks 2", "--ranks 3 --model gpt2", "--ranks 1 --adapters FOLDER --adapter fable")


def make_parser() -> cli.Parser:
    parser = cli.generation_parser("stage12_distributed tp", ABOUT, *EXAMPLES)
    group = parser.add_argument_group("ranks and adapters")
    whole, about = cli.whole_number(1, 64), "processes that share the model"
    group.add_argument("--ranks", type=whole, default=2, metavar="N", help=about)
    about = "folder whose subfolders are LoRA adapters, as PEFT saves them"
    group.add_argument("--adapters", default="", metavar="FOLDER", help=about)
    group.add_argument("--adapter", default="", metavar="NAME", help="one of them; default: none")
    return parser


def whole_model(options: argparse.Namespace) -> Any:
    """The model that command-line options name, with plain layers: what each rank loads."""
    return cli.load_model_from(options).model


def main(argv: list[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    prompt = cli.read_prompt(options)
    sampling = SamplingParams(**cli.sampling_fields(options))
    if options.threads is None:
        options.threads = max(1, torch.get_num_threads() // options.ranks)
    kind, options.linear = options.linear, "plain"  # before the model is split
    loaded = cli.load_model_from(options)
    load = partial(whole_model, options)
    group = RankGroup(
        Setup(load, options.ranks, linear=kind, adapters=options.adapters), loaded.model
    )
    names = group.model.adapters.names if group.model.adapters else {}
    if options.adapter and options.adapter not in names:
        known = ", ".join(names) or "none"
        raise UserError(f"There is no adapter {options.adapter}: --adapters has {known}.")
    engine: Any = make(group.model, contexts=1)
    request = engine.add(Request(loaded.tokenizer.encode(prompt), sampling))
    engine.scheduler.tables[request].salt = names.get(options.adapter, b"")
    print(prompt, end="", flush=True)
    for _, text in cli.with_text((token for _, token in engine.run()), loaded):
        print(text, end="", flush=True)
    print()
    group.close()
    return 0
