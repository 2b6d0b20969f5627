"""The best linear layer this machine has, put into any model after loading: the model does not know it.

On a CPU, PyTorch hands `nn.Linear` to a library (MKL) that lays the weight out anew for each product, and on AMD
machines that library leaves half to two thirds of the processor unused. oneDNN, which comes with PyTorch too, can lay
the weight out once, at load. On other processors the plain layer may win, so `optimize` measures both for a moment and
keeps the faster; where packing does not exist (CUDA, MPS, float64, a build without oneDNN) the plain layer stays.

Only the order of the additions differs between the two: results agree to rounding (tested).
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError

MODES = ("auto", "plain", "packed")
PACKED_DTYPES = (torch.float32, torch.bfloat16)
PACKED_FOR_ROWS = 32  # the layout that oneDNN picks for 32 rows was the best of all at 1 to 512 rows


def pack(weight: Tensor) -> Tensor:
    """`weight` (out, in) in oneDNN's blocked layout; an opaque tensor for `packed_linear` alone."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x (N, in) -> (N, out)."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight packed once. It holds its own copy; the original may be freed."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        self.packed = pack(plain.weight)  # no parameter and no buffer: state_dict cannot store the layout

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        rows = x.reshape(-1, self.in_features)
        return packed_linear(rows, self.packed, self.bias).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch packs weights of `dtype` for `device`; tried, not guessed."""
    if device.type != "cpu" or dtype not in PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    try:
        probe = pack(torch.eye(8, dtype=dtype))
        return torch.equal(packed_linear(torch.ones(2, 8, dtype=dtype), probe, None), torch.ones(2, 8, dtype=dtype))
    except (AttributeError, RuntimeError, NotImplementedError):  # operators that this build lacks
        return False


@torch.inference_mode()
def packed_is_faster(layers: list[nn.Linear], rows: tuple[int, ...] = (1, 32), repeats: int = 7) -> bool:
    """Time one layer of each shape plain and packed, in turn, on 1 row (decode) and on 32 (a batch); the smaller sum
    of medians over all layers wins."""
    shapes = {layer.weight.shape: layer for layer in layers}
    total = {"plain": 0.0, "packed": 0.0}
    for shape, layer in shapes.items():
        packed = pack(layer.weight)
        alike = sum(other.weight.shape == shape for other in layers)
        for count in rows:
            x = torch.randn(count, layer.in_features, dtype=layer.weight.dtype)
            times: dict[str, list[float]] = {"plain": [], "packed": []}
            for _ in range(repeats + 1):  # the first round warms up
                started = time.perf_counter()
                F.linear(x, layer.weight, layer.bias)
                between = time.perf_counter()
                packed_linear(x, packed, layer.bias)
                times["plain"].append(between - started)
                times["packed"].append(time.perf_counter() - between)
            for name, values in times.items():
                total[name] += alike * statistics.median(values[1:])
    return total["packed"] < total["plain"]


def optimize(model: nn.Module, mode: str = "auto") -> str:
    """Put the best linear layer into `model`, in place; returns which: "packed" or "plain".

    mode: "auto" measures both for a moment, "plain" leaves all as it is, "packed" insists.
    Raises UserError for an unknown mode, or where "packed" is asked for and cannot be had.
    """
    if mode not in MODES:
        raise UserError(f"Unknown kind of linear layer '{mode}': choose one of {', '.join(MODES)}.")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    if mode == "plain" or not layers:
        return "plain"
    weight = next(iter(layers.values())).weight
    device, dtype = weight.device, weight.dtype
    if not can_pack(device, dtype):
        if mode == "packed":
            names = " or ".join(str(d).removeprefix("torch.") for d in PACKED_DTYPES)
            raise UserError(
                f"Packed linear layers need a CPU build of PyTorch with oneDNN and {names}, not "
                f"{str(dtype).removeprefix('torch.')} on {device.type}: use --linear auto."
            )
        return "plain"
    if mode == "auto" and not packed_is_faster(list(layers.values())):
        return "plain"
    for name, layer in layers.items():
        model.set_submodule(name, PackedLinear(layer))
    return "packed"
