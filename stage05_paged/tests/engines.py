"""Engines of this stage for its tests, and what the tests do to their memory."""

from __future__ import annotations

from typing import Any

from stage04_continuous.plan import Plan
from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import the_model
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make


def engine_of(
    sequences: int = 256,
    budget: int = 256,
    model: Any = None,
    blocks: int = 60,
    size: int = 4,
    swap_blocks: int = 0,
    **options: Any,
) -> Any:
    """An engine with `blocks` blocks of `size` tokens, watched by the sanitizer."""
    return make(
        model or the_model(),
        pool=BlockPool(blocks, size),
        swap_pool=BlockPool(swap_blocks, size) if swap_blocks else None,
        max_sequences=sequences,
        token_budget=budget,
        sanitize=True,
        **options,
    )


def assert_idle(engine: Any) -> None:
    """No request, and no block that a table holds."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    assert not engine.requests and not scheduler.unfinished
    for name in ("tables", "parents", "swapped", "waiting", "running", "_preempted"):
        assert not getattr(scheduler, name), name
    assert pool.owned == 0
    assert scheduler.swap_pool is None or scheduler.swap_pool.owned == 0


def preempt(engine: Any, request: Request) -> None:
    """Take the memory of a running request, as the scheduler does when it needs room."""
    plan = Plan()
    engine.scheduler._preempt(plan, request)
    engine.runner.move(plan.moves)


def evict(engine: Any, count: int) -> None:
    """Evict the `count` blocks of the prefix cache whose use is longest ago."""
    pool = engine.scheduler.pool
    for block in [pool.take() for _ in range(len(pool.free) + count)]:
        pool.give_back(block)
