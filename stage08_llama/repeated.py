"""The way before grouped attention: copy keys and values for every query head, then attend as
usual.

It works with every cache, because caches see a model with as many heads of keys as of queries. So
it is right on every engine and serves as an oracle. But its cache is H / K times as large, and
takes H / K times as long to read.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stage01_forward.model import Attend

from .model import Llama


class RepeatedHeads:
    """`model`, with the keys and values of each head repeated for all queries that share it."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.config = replace(model.config, n_kv_head=model.config.n_head)
        self.logits = model.logits

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states (..., C), as `Llama` gives them."""
        group = self.config.n_head // self.model.config.n_kv_head

        def repeat(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(group, -2) for x in (k, v))  # (..., K, D) -> (..., H, D)
            return attend(layer, q, k, v)

        return self.model(ids, positions, repeat)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype
