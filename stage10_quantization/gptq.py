"""GPTQ: round a weight column by column, and let the columns to come make up for each error.

Frantar et al., "GPTQ" (2022). A layer's outputs matter, not its weights. With the inputs X of a
calibration text, rounding w to q costs (w - q) H (w - q)^T, with H = 2 X^T X. When column j is
rounded, the change of the columns behind it that costs least is known exactly:

    U = the upper Cholesky factor of H^-1
    e = (w_j - q_j) / U[j, j]          W[:, k] -= e * U[j, k] for all k > j

The columns are updated in blocks: at once within a block, and the rest when the block is done.
Each group takes its scale from the weights as they are when its first column is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from shared.conversion import convert
from shared.errors import UserError
from shared.stories import grammar
from stage01_forward.attention import Recompute

from .convert import FORMATS, Format, Quantize
from .layers import QuantizedLinear
from .matrix import QuantizedMatrix
from .numpy_quant import codes_of

BLOCK = 128  # columns
WINDOW = 512  # tokens


def gptq(weight: Tensor, hessian: Tensor, format: Format, damp: float = 0.01) -> QuantizedMatrix:
    """weight (N, K), hessian (K, K): X^T X of its inputs, times any factor -> codes and scales.

    damp: share of the mean diagonal that is added to it; more if it is not enough.
    """
    w, h = weight.float().clone(), hessian.double().clone()  # w changes as columns are rounded
    inputs = w.shape[1]
    group = format.group or inputs
    diagonal = h.diagonal()
    dead = diagonal == 0  # inputs that are always 0
    diagonal[dead] = 1
    w[:, dead] = 0
    upper = _upper(h, damp).to(w.dtype)

    codes = torch.empty(w.shape, dtype=torch.int8)  # contiguous, also of a transposed weight
    groups: list[QuantizedMatrix] = []  # with their scales and minima
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        errors = torch.zeros(len(w), end - start)
        for j in range(start, end):
            if j % group == 0:
                groups.append(format.nearest(w[:, j : j + group]))
            codes[:, j] = nearest(w[:, j], groups[-1])
            rounded = replace(groups[-1], codes=codes[:, j : j + 1]).dequantized()[:, 0]
            error = (w[:, j] - rounded) / upper[j, j]
            w[:, j:end] -= error[:, None] * upper[j, j:end]
            errors[:, j - start] = error
        w[:, end:] -= errors @ upper[start:end, end:]
    sides = (torch.cat(parts, 1) for parts in zip(*(part.sides for part in groups), strict=True))
    return QuantizedMatrix(codes, *sides, bits=format.bits)


def nearest(column: Tensor, group: QuantizedMatrix) -> Tensor:
    """The nearest codes for a column (N,) of a group with these scales and minima."""
    sides = (side.numpy() for side in group.sides)
    return torch.from_numpy(codes_of(column[:, None, None].numpy(), group.bits, *sides))[:, 0]


def _upper(hessian: Tensor, damp: float) -> Tensor:
    """The upper Cholesky factor (K, K) of the inverse of the damped `hessian`."""
    while True:
        damped = hessian + damp * hessian.diagonal().mean() * torch.eye(len(hessian)).double()
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
        damp = 10 * damp or 1e-6


@torch.inference_mode()
def calibrate(model: Any, windows: Sequence[Tensor], weights: str | Format = "int4") -> None:
    """Quantize all layers of `model` in place, in its order: each layer is calibrated on what the
    quantized layers before it make of the token ids `windows`, each (T,). Raises UserError for
    weights that do not fit."""
    format = FORMATS[weights] if isinstance(weights, str) else weights
    stack = next(m for m in model.children() if isinstance(m, nn.ModuleList))
    passes = [_first_arguments(model, stack[0], ids) for ids in windows]
    for number, block in enumerate(tqdm(stack, desc="GPTQ", unit="layer", disable=None)):
        layers = {name: m for name, m in block.named_modules() if type(m) is nn.Linear}
        for name, hessian in _hessians(block, layers, passes).items():
            full = f"layer {number}, {name}"
            if not hessian.isfinite().all():
                raise UserError(
                    f"The inputs of {full} are not finite on the calibration text: check the "
                    "checkpoint, or quantize without calibration."
                )
            format.quantized(full, layers[name].weight)  # refuses what does not fit
            matrix = gptq(layers[name].weight, hessian, format)
            block.set_submodule(name, QuantizedLinear(matrix, layers[name].bias))
        passes = [(block(*arguments), *arguments[1:]) for arguments in passes]
    convert(model, Quantize(weights))  # the head, and the table of tokens


def _first_arguments(model: Any, block: nn.Module, ids: Tensor) -> tuple[Any, ...]:
    """What the first block of `model` is called with for the tokens `ids`."""
    calls: list[tuple[Any, ...]] = []
    hook = block.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    model(ids, torch.arange(len(ids)), Recompute().attend)
    hook.remove()
    return calls[0]


def _hessians(
    block: nn.Module, layers: dict[str, nn.Linear], passes: Sequence[tuple[Any, ...]]
) -> dict[str, Tensor]:
    """2 X^T X of the inputs of `layers`, by name, over the `passes` through their block."""
    sums = {name: torch.zeros((layer.in_features,) * 2) for name, layer in layers.items()}

    def add(name: str, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        x = arguments[0].flatten(0, -2).float()
        sums[name].addmm_(x.t(), x, alpha=2)

    hooks = [layer.register_forward_pre_hook(partial(add, name)) for name, layer in layers.items()]
    for arguments in passes:
        block(*arguments)
    for hook in hooks:
        hook.remove()
    return sums


def windows_of(ids: Sequence[int], size: int = WINDOW) -> list[Tensor]:
    """The whole windows of `size` tokens. Raises UserError if there is none."""
    if len(ids) < size:
        raise UserError(
            f"The calibration text has {len(ids)} tokens, less than a window of {size}: give a "
            "longer text."
        )
    return list(torch.tensor(ids[: len(ids) // size * size]).split(size))


def text_ids(tokenizer: Any, end: int, tokens: int, file: str | None, seed: str) -> list[int]:
    """Ids of a text file, at most `tokens`; without one, of stories with an end of text before
    each. Raises UserError for a file that cannot be read."""
    if file is not None:
        try:
            return list(tokenizer.encode(Path(file).read_text(encoding="utf-8"))[:tokens])
        except (OSError, ValueError) as error:
            raise UserError(
                f"{file} cannot be read ({error}): give the name of a text file in UTF-8."
            ) from None
    ids: list[int] = []
    stories = grammar.stories(seed)
    while len(ids) < tokens:
        ids += [end, *tokenizer.encode(next(stories).text)]
    return ids[:tokens]
