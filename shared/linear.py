"""Linear layers laid out once, at load, for this machine.

On a CPU, PyTorch hands `nn.Linear` to a library (MKL) that lays the weight out anew for each
product. oneDNN, which comes with PyTorch, can lay it out once, and computes a GELU on the way out
at no cost. One rule decides, and --linear plain turns it off:

- float32: packed from 2 rows on. A single row waits for the weight's bytes alone, and reads the
  plain weight by rows, which stays in memory (`one_row`).
- bfloat16, on a processor with products in it: always packed, and the plain weight can go.
- other 16 bits on a CPU: computed in float32, a piece of the weight at a time, from 8 rows on (on
  AVX2 up to 42 times as fast).
- all else (CUDA, float64, a build without oneDNN): plain.

Only the order of the additions differs, so results agree to rounding (tested).
"""

from __future__ import annotations

import platform
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKED_DTYPES = (torch.float32, torch.bfloat16)
WIDENED_DTYPES = (torch.bfloat16, torch.float16)
PACKED_FOR_ROWS = 32  # oneDNN's layout for 32 rows was as good as any at 1 row, the best from 2 on
WIDENED_ROWS = 8  # fewer take less time in 16 bits
WIDENED = 2**19  # numbers of a weight in float32 at a time: 2 MiB, which caches hold
CPUINFO = Path("/proc/cpuinfo")  # of Linux
AMD = "AuthenticAMD" in (CPUINFO.read_text() if CPUINFO.exists() else platform.processor())


def pack(weight: Tensor) -> Tensor:
    """`weight` (out, in) in oneDNN's blocked layout: an opaque tensor for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """x (N, in) -> (N, out), followed by GPT-2's GELU if `gelu`."""
    return torch.ops.mkldnn._linear_pointwise(
        x, packed, bias, "gelu" if gelu else "none", [], "tanh" if gelu else ""
    )


@cache
def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch packs weights of `dtype` for `device`."""
    if device.type != "cpu" or dtype not in PACKED_DTYPES:
        return False
    try:
        packed_linear(torch.ones(2, 8, dtype=dtype), pack(torch.eye(8, dtype=dtype)), None, True)
    except (AttributeError, RuntimeError):  # operators that this build or processor lacks
        return False
    return True


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (1, in), weight (out, in) -> (1, out). On AMD's processors MKL does this with one thread,
    and a batch of parts takes 0.3 to 0.8 times as long; on Intel's it takes twice as long."""
    count = next((n for n in range(2, 65) if len(weight) % n == 0), 0)
    if not AMD or not count:
        return F.linear(x, weight, bias)
    column = x.expand(count, 1, -1).transpose(1, 2)  # (P, in, 1), the same memory P times
    y = torch.bmm(weight.view(count, -1, x.shape[1]), column).view(1, -1)
    return y if bias is None else y + bias


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight packed once. `gelu` True applies GPT-2's GELU to the result."""

    def __init__(self, plain: nn.Linear, gelu: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gelu = plain.in_features, plain.out_features, gelu
        # No parameters and no buffers: a state_dict cannot store the packed layout.
        self.bias = None if plain.bias is None else plain.bias.detach()
        weight = plain.weight.detach()
        self.packed, self.dtype = pack(weight), weight.dtype
        self.row_weight = weight.contiguous() if weight.dtype == torch.float32 else None

    @property
    def weight(self) -> Tensor:
        """The weight (out, in), recovered exactly by applying the layer to the unit matrix."""
        if self.row_weight is not None:
            return self.row_weight
        return packed_linear(torch.eye(self.in_features, dtype=self.dtype), self.packed, None).t()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        flat = x.reshape(-1, self.in_features)
        if len(flat) == 1 and self.row_weight is not None:
            y = one_row(flat, self.row_weight, self.bias)
            y = F.gelu(y, approximate="tanh") if self.gelu else y
        else:
            y = packed_linear(flat, self.packed, self.bias, self.gelu)
        return y.view(*x.shape[:-1], self.out_features)


class WidenedLinear(nn.Module):
    """`nn.Linear` in 16 bits that computes in float32 from WIDENED_ROWS rows on. For fewer it needs
    the weight by rows: as a transposed view PyTorch reads it up to 30 times as slowly."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight = nn.Parameter(plain.weight.detach().contiguous(), requires_grad=False)
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        flat = x.reshape(-1, self.in_features)
        if len(flat) < WIDENED_ROWS:
            return F.linear(x, self.weight, self.bias)
        wide, y = flat.float(), flat.new_empty(len(flat), self.out_features)
        size = max(1, WIDENED // self.in_features)  # outputs at a time
        for start in range(0, self.out_features, size):
            piece = slice(start, start + size)
            bias = None if self.bias is None else self.bias[piece].float()
            y[:, piece] = F.linear(wide, self.weight[piece].float(), bias)
        return y.view(*x.shape[:-1], -1)


def optimize(model: nn.Module, mode: str = "auto") -> str:
    """Lay the linear layers of `model` out by the rule above, in place; "plain" changes nothing.
    Returns "packed", "widened" or "plain". What is not exactly nn.Linear stays. GPT-2's GELU behind
    a packed layer moves into it."""
    kind = "plain"
    for parent in list(model.modules()) if mode == "auto" else ():
        children = [*parent.named_children(), ("", None)]
        for (name, layer), (following, activation) in pairwise(children):
            if type(layer) is not nn.Linear:
                continue
            device, dtype = layer.weight.device, layer.weight.dtype
            if can_pack(device, dtype):
                kind = "packed"
                gelu = type(activation) is nn.GELU and activation.approximate == "tanh"
                setattr(parent, name, PackedLinear(layer, gelu))
                if gelu:
                    setattr(parent, following, nn.Identity())
            elif device.type == "cpu" and dtype in WIDENED_DTYPES:
                kind = "widened"
                setattr(parent, name, WidenedLinear(layer))
    return kind
