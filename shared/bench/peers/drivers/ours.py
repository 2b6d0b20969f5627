"""An engine of this project."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from shared import linear
from stage01_forward import families
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage05_paged.blocks import BlockPool

from . import BUDGET, SEQUENCES, TOKENS

BLOCK = 16


def load(folder: Path, dtype: str, threads: int, stage: str) -> Any:
    torch.set_num_threads(threads)
    offer = import_module(f"{stage}.make")
    model = families.load_model(families.load(str(folder)), dtype=getattr(torch, dtype))
    linear.optimize(model, getattr(offer, "LINEAR", "auto"))
    options: dict[str, Any] = {"max_sequences": SEQUENCES, "token_budget": BUDGET}
    if hasattr(offer, "LINEAR"):
        options["insist"] = True  # the kernels, or an error
    engine = offer.make(
        model, pool=BlockPool(TOKENS // BLOCK, BLOCK), prefix_caching=False, **options
    )

    def answer(prompts: list[list[int]], count: int, emit: Any) -> None:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        rows = {engine.add(Request(ids, params)).id: row for row, ids in enumerate(prompts)}
        while engine.requests:
            emit((rows[id], token.id) for id, token in engine.step())

    return answer
