"""Stage 05: stage 04's engine, unchanged, over memory that is taken a block at a time, shared, and
given back when it runs out.

The engine knows requests and plans. Only the scheduler knows which memory a request has, and only
the cache knows how to address it. So those two are new in this stage; `make` combines all three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stage01_forward.model import Model
from stage04_continuous.engine import Engine, Sampled, sample_tokens
from stage04_continuous.plan import Observer
from stage04_continuous.recorder import Recorder
from stage04_continuous.runner import AnyRunner, Runner

from .blocks import BlockPool
from .cache import BlockCache, PagedCache
from .memory import SEQUENCES, default_memory, free_memory, make_pool
from .sanitizer import Sanitizer
from .scheduler import Scheduler


def make(
    model: Model,
    contexts: int | None = None,
    *,
    pool: BlockPool | None = None,
    swap_pool: BlockPool | None = None,
    block_size: int = 16,
    dtype: torch.dtype | None = None,
    sanitize: bool = False,
    eos_ids: Sequence[int] | None = None,
    observers: Sequence[Observer] = (),
    make_cache: Callable[..., BlockCache] = PagedCache,
    make_runner: Callable[..., AnyRunner] = Runner,
    sample_tokens: Callable[..., list[Sampled]] = sample_tokens,
    **options: Any,
) -> Engine[Scheduler]:
    """The engine with the blocks of `pool`; without a pool, with blocks for `contexts` whole
    contexts; with neither, with those of `default_memory` for SEQUENCES requests at a time.

    dtype: of the cache; None: the model's.
    sanitize: check after every step that no block is lost, shared by mistake or read after it was
        given back; slow.
    make_cache, make_runner, sample_tokens: another stage's, with the arguments of PagedCache,
        Runner and stage 04's function.
    options: those of Scheduler. Raises UserError for invalid settings.
    """
    config, dtype = model.config, model.dtype if dtype is None else dtype
    if pool is None and contexts is not None:
        pool = BlockPool(contexts * -(-config.n_positions // block_size), block_size)
    elif pool is None:
        memory = default_memory(config, dtype, SEQUENCES, free_memory(model.device), block_size)
        pool = make_pool(memory, config, dtype, block_size)
        options = {"max_sequences": SEQUENCES, **options}
    swap_blocks = swap_pool.count if swap_pool else 0
    cache = make_cache(config, pool.count, pool.block_size, swap_blocks, dtype, model.device)
    runner = make_runner(model, cache)
    options = {"longest": config.n_positions, **options}
    scheduler = Scheduler(pool, swap_pool=swap_pool, **options)
    if sanitize:
        observers = [*observers, Sanitizer(scheduler, cache.memory)]
    recorder = Recorder(scheduler, lambda plan: scheduler.pool.owned)
    return Engine(runner, scheduler, eos_ids, recorder, observers, sample_tokens)
