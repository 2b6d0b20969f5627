"""The map of the blocks and their owners. It shows the scheduler's tables and the pool's lists: the
state, not a plan."""

from __future__ import annotations

import string

from .scheduler import Scheduler

FREE, CACHED, SHARED = -1, -2, -3
MARKS = {FREE: ".", CACHED: "+", SHARED: "#"}
LETTERS = string.ascii_lowercase + string.ascii_uppercase
KEY = (
    f"a letter: a sequence, {MARKS[SHARED]} shared by several, {MARKS[CACHED]} cached, "
    f"{MARKS[FREE]} free"
)


def blockmap(scheduler: Scheduler) -> list[int]:
    """For each block of the pool: FREE, CACHED, SHARED, or the number of its only owner.

    That number is the request's arrival, which is unique and never changes.
    """
    pool = scheduler.pool
    states = [FREE] * pool.count
    for block in pool.cached:
        states[block] = CACHED
    for request, table in scheduler.tables.items():
        for block in table.blocks:
            states[block] = request.arrival if pool.references[block] == 1 else SHARED
    return states


def mark(state: int) -> str:
    """The character for a block: a letter for a sequence, taken in turn."""
    return LETTERS[state % len(LETTERS)] if state >= 0 else MARKS[state]
