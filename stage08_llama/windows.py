"""Sliding windows: in some layers of some models a query sees only its own key and the W - 1
before it.

A window is three things, and this file brings each to where the others are served: a mask, for
attention over a whole sequence; a gather that begins at the window, for stage 05's cache; and
memory that comes back, for its scheduler, because no later query sees the blocks behind the window.
Engines of stages 02 to 04 run such a model within its smallest window, where nothing is hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from shared.attention import attention
from stage01_forward.attention import Recompute
from stage01_forward.families import Whole
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request
from stage05_paged.blocks import BlockPool
from stage05_paged.cache import PagedAttention, PagedCache, Share, check_places
from stage05_paged.scheduler import Scheduler

from .config import LlamaConfig

log = logging.getLogger(__name__)


def window_mask(keys: Tensor, queries: Tensor, window: int) -> Tensor:
    """Which keys the queries see, by position; both broadcast to the result."""
    return (keys <= queries) & (keys > queries - window)


# ---- for stages 01 to 04 ------------------------------------------------------------------------


class WindowedRecompute:
    """Stage 01's attention over a whole sequence, with each layer's window."""

    def __init__(self, windows: Sequence[int]) -> None:
        self.windows, self.whole = windows, Recompute()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, H, D), k and v (T, H_kv, D) -> (T, H, D)."""
        window, positions = self.windows[layer], torch.arange(len(q), device=q.device)
        if len(q) <= window:
            return self.whole.attend(layer, q, k, v)
        mask = window_mask(positions, positions[:, None], window)  # (T, T)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, heads, T, D)
        return attention(q, k, v, mask)[0].transpose(0, 1)


def whole_attention(config: LlamaConfig) -> Whole:
    return WindowedRecompute(config.windows) if config.windows else Recompute()


@cache  # so that it is said once
def plain(config: LlamaConfig) -> LlamaConfig:
    """The config with the context of the smallest window, within which no key is hidden."""
    window = min(config.windows, default=config.n_positions)
    if window >= config.n_positions:
        return config
    log.warning(
        "%s has a sliding window of %d tokens, which stages 02 to 04 do not implement: there its "
        "context is %d tokens, not %d. Later stages serve all of it.",
        config.name,
        window,
        window,
        config.n_positions,
    )
    return replace(config, n_positions=window)


# ---- for stage 05's engine ----------------------------------------------------------------------


class WindowedAttention(PagedAttention):
    """Attention of one pass in which a query sees at most `window` tokens."""

    def __init__(self, kv: Tensor, shares: Sequence[Share], window: int) -> None:
        self.window = window
        super().__init__(kv, shares)

    def sees_all(self, tokens: int) -> bool:
        return tokens <= self.window

    def visible(self, columns: Tensor, positions: Tensor) -> Tensor:
        return window_mask(columns, positions, self.window)

    def add_tiles(self, rows: slice, new: int, tables: Tensor, positions: Tensor) -> None:
        """Gather only from the first block on that one of the queries sees."""
        size = self.kv.shape[4]
        first = max(0, int(positions.min()) - self.window + 1) // size
        super().add_tiles(rows, new, tables[:, first:], positions - first * size)


class ByLayer:
    """Attention of one pass, by each layer's own window. All write to the same slots."""

    def __init__(self, layers: Sequence[PagedAttention]) -> None:
        self.layers = layers
        self.order, self.positions = layers[0].order, layers[0].positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layers[layer].attend(layer, q, k, v)


class WindowedCache:
    """Stage 05's cache, in which the queries of a layer see the tokens of its window."""

    def __init__(self, config: LlamaConfig, *sizes: Any, **options: Any) -> None:
        self.paged, self.windows = PagedCache(config, *sizes, **options), config.windows
        self.memory, self.move, self.bytes = self.paged.memory, self.paged.move, self.paged.bytes
        self.blocks, self.block_size = self.paged.blocks, self.paged.block_size
        self.dtype = self.paged.dtype

    def extend(self, shares: Sequence[Share]) -> ByLayer:
        check_places(shares, self.block_size)
        widest, size, held = max(self.windows), self.block_size, []
        for blocks, start, count in shares:
            # What a table has behind the window may be a neighbour's by now, and hold a NaN.
            behind = max(0, start - widest + 1) // size
            held.append((blocks[-1:] * behind + blocks[behind:], start, count))
        kinds = {
            window: WindowedAttention(self.paged.kv, held, window) for window in {*self.windows}
        }
        return ByLayer([kinds[window] for window in self.windows])


class WindowedScheduler(Scheduler):
    """Stage 05's scheduler, which gives back the blocks that no later query sees.

    window: most tokens that a query sees in any layer.

    A table keeps its length, so that addresses hold: each block that it gives back is replaced by
    one block that nothing reads, `unread`, which all tables share (vLLM's null block). It is taken
    from the pool when a first table needs it, and goes back with the last.
    """

    def __init__(self, pool: BlockPool, *, window: int, **options: Any) -> None:
        super().__init__(pool, **options)
        self.window = window
        self.unread: int | None = None

    def out_of_window(self, tokens: int) -> int:
        """Number of blocks that neither a query after `tokens` tokens nor any later one sees."""
        return max(0, tokens - self.window + 1) // self.pool.block_size

    def advance(self, plan: Plan) -> None:
        super().advance(plan)
        for work in plan.work:
            self._drop_before(work.request)

    def _drop_before(self, request: Request) -> None:
        """Give back the blocks of `request` that are out of its window, the last first."""
        blocks, pool = self.tables[request].blocks, self.pool
        for index in range(self.out_of_window(request.computed) - 1, -1, -1):
            block = blocks[index]
            if block == self.unread:
                break  # and all before it
            if self.unread is None and not pool.available and pool.references[block] > 1:
                break  # there is no block to put in its place, until a later step
            pool.give_back(block)
            if self.unread is None:
                self.unread = pool.take()
            else:
                pool.share(self.unread)
            blocks[index] = self.unread

    def finish(self, request: Request) -> None:
        if request in self.tables and request.output.error is not None:
            table = self.tables[request]  # blocks that it gave back must not be found either
            for block in self.pool.match(table.digests):
                if block not in table.blocks:
                    self.pool.share(block)
                    self.pool.unpublish(block)
                    self.pool.give_back(block)
        super().finish(request)
        self._forget_unread()

    def _preempt(self, plan: Plan, request: Request) -> None:
        super()._preempt(plan, request)
        self._forget_unread()

    def _forget_unread(self) -> None:
        if self.unread is not None and not self.pool.references[self.unread]:
            self.unread = None

    def _parents_blocks(self, request: Request, known: int) -> list[int]:
        """Only if the parent has given back none of the blocks that `request` will see. Those that
        it gave back before a swap are its own again, but without their tokens."""
        parent = request.parent
        if parent is None or self.out_of_window(parent.computed) > self.out_of_window(known):
            return []
        return super()._parents_blocks(request, known)


def organs(config: LlamaConfig) -> Mapping[str, Callable]:
    if not config.windows:
        return {}
    scheduler = partial(WindowedScheduler, window=max(config.windows))
    return {"make_cache": WindowedCache, "make_scheduler": scheduler}
