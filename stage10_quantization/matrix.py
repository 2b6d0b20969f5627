"""A matrix of whole numbers with scales.

It is what all of this stage exchanges: `convert`, `gptq` and the readers of files make it,
`QuantizedLinear` and the kernels multiply by it, `folder` stores it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shared.errors import UserError

PROJECTIONS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in GPT-2's folders


@dataclass(frozen=True)
class QuantizedMatrix:
    """The matrix (N, K) that is scale * codes + minimum, with one scale and one minimum for each
    row and each group of K / G columns.

    codes: (N, K) int8, one a byte. bits: that a code needs; kernels take 4 and 8. Without a minimum
        codes are signed, -2^(bits - 1) to 2^(bits - 1) - 1: files hold both ends. With a minimum
        they are 0 to 2^bits - 1, and bits is less than 8.
    scale: (N, G) float32. minimum: (N, G) float32, or None.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    bits: int = field(default=8, kw_only=True)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def sides(self) -> tuple[Tensor, ...]:
        """The scale, and the minimum if there is one."""
        return (self.scale,) if self.minimum is None else (self.scale, self.minimum)

    @property
    def group(self) -> int:
        """Columns that share a scale: K if each row has one scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def rows(self, index: Tensor) -> QuantizedMatrix:
        """The matrix of the rows `index` (R,) alone."""
        sides = (side[index] for side in self.sides)
        return QuantizedMatrix(self.codes[index], *sides, bits=self.bits)

    def columns(self, index: Tensor) -> QuantizedMatrix:
        """The matrix of the columns `index` (C,) alone: any if a row has one scale, else whole
        groups. Raises UserError for a part of a group."""
        if self.scale.shape[1] == 1:
            return replace(self, codes=self.codes[:, index])
        first = index[:: self.group]  # of each group
        whole = first[:, None] + torch.arange(self.group, device=index.device)
        if not torch.equal(whole.flatten(), index) or (first % self.group).any():
            raise UserError(
                f"A quantized layer cannot be split inside its groups of {self.group} columns: "
                "choose fewer parts, or --weights int8, which has no groups."
            )
        sides = (side[:, first // self.group] for side in self.sides)
        return QuantizedMatrix(self.codes[:, index], *sides, bits=self.bits)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(N, K): scale * codes, then + minimum, each rounded to float32."""
        grouped = self.codes.unflatten(1, (-1, self.group)) * self.scale[:, :, None]
        if self.minimum is not None:
            grouped = grouped + self.minimum[:, :, None]
        return grouped.flatten(1).to(dtype)
