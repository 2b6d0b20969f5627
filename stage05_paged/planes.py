"""The memory of a cache of blocks: one or more planes, which move together.

A plane is a tensor whose first axis counts blocks. Stage 05's cache has one plane, for keys and
values; another may keep scales or codes in a second. What moves, compares or poisons blocks (the
scheduler's moves, the sanitizer, another process) does so in all planes alike and never asks what
is in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import Move

POISON = 0xFF  # in every byte: NaN in all floating-point formats


class Planes:
    """`planes`, and `swapped`, their counterparts in the swap pool; the blocks come first in each.
    They are views of what a cache reads and writes, in whatever order it likes."""

    def __init__(self, planes: Sequence[Tensor], swapped: Sequence[Tensor]) -> None:
        self.planes, self.swapped = tuple(planes), tuple(swapped)

    def move(self, moves: Sequence[Move]) -> None:
        """Do `moves`, one after the other."""
        for plane, swapped in zip(self.planes, self.swapped, strict=True):
            for move in moves:
                target = (swapped if move.kind == "out" else plane)[move.target]
                if move.kind == "wipe":
                    target.zero_()
                else:
                    target.copy_((swapped if move.kind == "in" else plane)[move.source])

    def read(self, blocks: Sequence[int]) -> Tensor:
        """A copy of `blocks`, (blocks, bytes of each) uint8: for checks."""
        chosen = [plane[list(blocks)].flatten(1).view(torch.uint8) for plane in self.planes]
        return torch.cat(chosen, dim=1)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill `blocks`, which hold no tokens, with POISON: for checks."""
        for plane in self.planes:
            plane.view(torch.uint8)[list(blocks)] = POISON
