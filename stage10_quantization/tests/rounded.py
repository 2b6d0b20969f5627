"""The oracle of caches in int8: attention over a whole sequence of rounded keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stage10_quantization.cache import quantize


class Rounded:
    """The attention of a pass over a whole sequence, `whole`, as a cache in int8 lets it see keys
    and values."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, heads, D), k and v (T, H, D) -> (T, heads, D)."""
        real = torch.promote_types(q.dtype, torch.float32)
        pairs = [quantize(x.to(real)) for x in (k, v)]
        k, v = ((codes * scales.to(real)[..., None]).to(q.dtype) for codes, scales in pairs)
        attended: Tensor = self.whole.attend(layer, q, k, v)
        return attended
