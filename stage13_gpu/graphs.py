"""A decode step as one launch.

A step of a small model is over before Python has launched its kernels: a hundred launches of some
microseconds each take longer than the bytes. A CUDA graph records them once and replays them as
one. What it records are addresses, so nothing may move: the numbers of a pass are copied to the
place where they were, and results are read where they were. A replay runs the same grid, too, so
steps are grouped by size: up to 1, 2, 4, ... rows and pieces of keys. Rows that a step lacks have
no slot and no keys.

Prefill and mixed steps run without a graph: there, launches hide behind arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .cache import PIECE, GpuAttention, GpuCache, Shape

from triton import next_power_of_2  # isort: skip

MOST_ROWS = 256
WARMUPS = 3  # passes before a capture: libraries allocate and choose kernels in the first ones

Work = Callable[[], Tensor]
Capture = Callable[[Work], tuple[Callable[[], Any], Tensor]]


def capture_cuda(pool: Any) -> Capture:
    """Captures work as a graph whose memory comes from `pool`, which all graphs share: a replay
    overwrites the results of the one before. All are captured on one stream, because libraries keep
    memory for each; other threads may use the GPU meanwhile."""
    side = torch.cuda.Stream()

    def capture(work: Work) -> tuple[Callable[[], Any], Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        graph, mode = torch.cuda.CUDAGraph(), "thread_local"
        with torch.cuda.stream(side):  # left again if the capture fails
            for _ in range(WARMUPS):
                work()
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode=mode):
                logits = work()
        torch.cuda.current_stream().wait_stream(side)
        return graph.replay, logits

    return capture


class Graphs:
    """The captured steps of one runner, by shape; each is captured when it is first needed.
    compute: a pass -> its logits."""

    def __init__(
        self,
        cache: GpuCache,
        compute: Callable[[GpuAttention], Tensor],
        capture: Capture | None = None,
    ) -> None:
        self.cache, self.compute = cache, compute
        self.capture = capture or capture_cuda(torch.cuda.graph_pool_handle())
        # Of each graph, where its input is, how to replay it, and where its logits (rows, V) are.
        self.kept: dict[Shape, tuple[Tensor, Callable[[], Any], Tensor]] = {}

    def shape(self, shares: Sequence[Any], rows: Sequence[int]) -> Shape | None:
        """The shape of the graph that serves a pass; None if it is no decode step, or too large."""
        exact = self.cache.shape(shares)
        count = exact.tokens
        if exact.tiles or count > MOST_ROWS or list(rows) != list(range(count)):
            return None
        size, pieces = next_power_of_2(count), next_power_of_2(exact.pieces)
        width = -(-pieces * PIECE // self.cache.block_size)
        return Shape(size, size, size, 0, size, width, pieces)

    def run(self, shape: Shape, ids: Sequence[int], shares: Sequence[Any]) -> Tensor:
        """Logits (N, V) of a decode step of N rows, until the next one."""
        count = len(ids)
        numbers = self.cache.numbers(shape, shares, ids, range(count))
        if shape not in self.kept:  # to write the same keys several times does no harm
            place = numbers.to(self.cache.device)
            attention = GpuAttention(self.cache, shape, place)
            self.kept[shape] = place, *self.capture(lambda: self.compute(attention))
        place, replay, logits = self.kept[shape]
        place.copy_(numbers, non_blocking=True)
        replay()
        return logits[:count]
