"""numpy_quant.py in PyTorch, for whole models: the same bits (tested)."""

from __future__ import annotations

import torch
from torch import Tensor

from .layers import QuantizedMatrix

AT_A_TIME = 2**22  # weights: what is made on the way takes some 50 MB


def up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest numbers of `dtype` that are at least x (float64)."""
    y = x.to(dtype)
    return torch.where(y.double() < x, torch.nextafter(y, y.new_tensor(torch.inf)), y)


def fit(
    groups: Tensor, bits: int, minimum: bool, dtype: torch.dtype, zero: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Scales and minima (...), float32 with values of `dtype`, for groups (..., group). zero:
    minima are whole multiples of the scales instead, so that 0 is exact."""
    low, high = (x.double() for x in groups.float().aminmax(dim=-1))  # NaN if one is
    if not minimum:
        largest = torch.maximum(-low, high)
        scale = up(largest / (2 ** (bits - 1) - 1), dtype).float()
        return torch.where(scale.isfinite(), scale, torch.nan), None
    if zero:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = up((high - low) / (2**bits - 1), dtype).float()
        code = (-low / torch.where(scale > 0, scale, 1)).round().float()
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        return scale, torch.where(scale.isfinite(), -(scale * code), 0)
    floor = -up(-low, dtype).double()
    width = high - floor
    scale = up(width / (2**bits - 1), dtype).float()
    usable = scale.isfinite() & floor.isfinite() & width.float().isfinite()
    return torch.where(usable, scale, torch.nan), torch.where(usable, floor, 0).float()


def codes_of(groups: Tensor, scale: Tensor, minimum: Tensor | None, bits: int) -> Tensor:
    """Codes (..., group) int8 of groups (..., group), clipped to the range of the codes."""
    most = 2 ** (bits - 1) - 1
    groups, lowest, highest = groups.float(), -most, most
    if minimum is not None:
        groups, lowest, highest = groups - minimum[..., None], 0, 2**bits - 1
    divided = groups / torch.where(scale > 0, scale, 1)[..., None]
    codes = torch.where(scale.isnan()[..., None], 0, divided).round_()
    return codes.clamp_(lowest, highest).to(torch.int8)


def quantize(
    weight: Tensor,
    bits: int = 8,
    group: int | None = None,
    minimum: bool = False,
    dtype: torch.dtype = torch.float32,
    zero: bool = False,
) -> QuantizedMatrix:
    """weight (N, K) -> `symmetric` of the page, or with a `minimum` its `asymmetric`. group: None
    for a whole row; it must divide K. dtype: of the values of scales and minima. zero: see
    `fit`."""
    outputs, inputs = weight.shape
    group = group or inputs
    codes = torch.empty(outputs, inputs, dtype=torch.int8, device=weight.device)
    scale = torch.empty(outputs, inputs // group, device=weight.device)
    minima = torch.empty_like(scale) if minimum else None
    step = max(1, AT_A_TIME // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        groups = weight[rows].unflatten(1, (-1, group))
        scale[rows], low = fit(groups, bits, minimum, dtype, zero)
        if minima is not None and low is not None:
            minima[rows] = low
        codes[rows] = codes_of(groups, scale[rows], low, bits).flatten(1)
    return QuantizedMatrix(codes, scale, minima, bits)
