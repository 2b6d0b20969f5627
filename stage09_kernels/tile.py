"""The register tile of a matrix product, with PyTorch numbers in place of registers.

A product needs every weight once for each row of x. A processor computes far faster than it loads,
so a kernel keeps a tile of sums, MR rows by NR columns, in registers, and uses each loaded weight
MR times and each loaded number of x NR times. fast/linear.c does this in C; here a `Memory` counts
what was loaded. Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
"""

from __future__ import annotations

import torch
from torch import Tensor

MR, NR = 4, 16  # rows and columns of a tile


class Memory:
    """Numbers of this `shape` (rows, columns) and `dtype`, outside of the registers. loads: how
    many of them were loaded."""

    def __init__(self, numbers: Tensor) -> None:
        rows, columns = numbers.shape
        self.shape, self.dtype, self.loads = (rows, columns), numbers.dtype, 0
        self._numbers = numbers

    def load(self, row: int, column: int, count: int = 1) -> Tensor:
        """`count` adjacent numbers of a row, (count,). Raises IndexError outside of it."""
        rows, columns = self.shape
        if not (0 <= row < rows and column >= 0 and count >= 1 and column + count <= columns):
            raise IndexError(f"{count} numbers at ({row}, {column}) of {rows} x {columns}")
        self.loads += count
        return self._numbers[row, column : column + count]


def product(x: Memory, weights: Memory) -> Tensor:
    """x (rows, inputs) times weights (inputs, outputs), tile by tile: (rows, outputs).

    For each input a tile loads at most MR numbers of x and NR weights, and each of them once; it
    keeps none for the next tile.
    """
    (rows, inputs), (_, outputs) = x.shape, weights.shape
    out = torch.empty(rows, outputs, dtype=x.dtype)
    for row in range(0, rows, MR):
        height = min(MR, rows - row)  # the last tiles are smaller
        for column in range(0, outputs, NR):
            width = min(NR, outputs - column)
            tile = torch.zeros(height, width, dtype=x.dtype)
            for k in range(inputs):
                line = weights.load(k, column, width)
                for i in range(height):
                    tile[i] += x.load(row + i, k) * line
            out[row : row + height, column : column + width] = tile
    return out


def most_loads(rows: int, inputs: int, outputs: int) -> tuple[int, int]:
    """How many numbers of x, and how many weights, `product` loads: no tile keeps any."""
    return rows * inputs * -(-outputs // NR), inputs * outputs * -(-rows // MR)
