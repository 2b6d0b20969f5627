"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from shared.course.driver import Entry, now, tensors

from . import online, program, tile


def running_softmax(draw: Random) -> Iterator[Entry]:
    """Blocks in any order, with NaN in all that must not be read."""
    for _ in range(12):
        block, width = draw.choice([1, 4, 5, 16]), draw.choice([2, 8, 24])
        tokens = draw.choice([1, block, block + 1, draw.randint(1, 60)])
        count, kind = -(-tokens // block), draw.choice([torch.float64, torch.float32])
        keys, values = torch.full((2, count + 3, block, width), torch.nan, dtype=kind)
        table = draw.sample(range(count + 3), count)
        lines = tensors(draw, 2, tokens, width, dtype=kind)
        for token in range(tokens):
            keys[table[token // block], token % block] = lines[0, token]
            values[table[token // block], token % block] = lines[1, token]
        scale = draw.choice([1, 1, 30, 300])
        q = scale * tensors(draw, width, dtype=kind)
        call = f"attend: {tokens} tokens in blocks {table} of {block}, width {width}, times {scale}"
        now(call)
        yield {"call": call, "out": online.attend(q, keys, values, table, tokens)}
        keys[table[0], 0] += 100  # a maximum in the first block, and then in the last one
        yield {"call": call, "out": online.attend(q, keys, values, table, tokens)}
        keys[table[-1], (tokens - 1) % block] += 1e4
        yield {"call": call, "out": online.attend(q, keys, values, table, tokens)}


def merged(draw: Random) -> Iterator[Entry]:
    """Parts of random sizes, some of them empty."""
    for _ in range(12):
        width = draw.choice([2, 8])
        parts, sizes = [], [draw.choice([0, 1, 3, 9]) for _ in range(draw.randint(1, 5))]
        sizes[draw.randrange(len(sizes))] = 2
        for size in sizes:
            scores = tensors(draw, size) * draw.choice([1, 30, 400])
            values = tensors(draw, size, width)
            largest = scores.max() if size else torch.tensor(-torch.inf, dtype=torch.float64)
            weights = (scores - largest).exp()
            parts.append((largest, weights.sum(), weights @ values))
        call = f"merge of parts of {sizes} tokens, with the maxima {[p[0].item() for p in parts]}"
        yield {"call": call, "out": online.merge(parts)}


class Worn(tile.Memory):
    """A memory in which each load adds 1 to the numbers loaded: a product shows which it used."""

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__(numbers)
        self.numbers = numbers

    def load(self, row: int, column: int, count: int = 1) -> torch.Tensor:
        if row < 0 or column < 0 or count < 1 or column + count > self.numbers.shape[1]:
            raise IndexError(f"{count} numbers at ({row}, {column}) of {list(self.numbers.shape)}")
        line = self.numbers[row, column : column + count]
        loaded = line.clone()
        line += 1
        return loaded


def tiles(draw: Random) -> Iterator[Entry]:
    """Products of all sizes. No count of loads is returned, which a submission could forge."""
    for _ in range(6):
        rows = draw.choice([1, 3, 4, 5, 9])
        inputs, outputs = draw.choice([1, 2, 7]), draw.choice([1, 15, 16, 17, 40])
        x, weights = Worn(tensors(draw, rows, inputs)), Worn(tensors(draw, inputs, outputs))
        call = f"product of ({rows}, {inputs}) and ({inputs}, {outputs}), each load of which adds 1"
        now(call)
        yield {"call": call, "out": tile.product(x, weights)}


def panels(draw: Random) -> Iterator[Entry]:
    for _ in range(6):
        inputs = draw.choice([1, 5])
        sizes = [draw.choice([1, 3, 63, 64, 65, 130]) for _ in range(draw.randint(1, 3))]
        kind = draw.choice([torch.float32, torch.float64, torch.bfloat16])
        weights = [tensors(draw, size, inputs) for size in sizes]
        packed = program.pack(weights, kind)
        call = f"pack of {sizes} outputs and {inputs} inputs, {kind}"
        yield {"call": call, "panels": packed}


DRIVERS = {1: running_softmax, 2: merged, 3: tiles, 4: panels}
