"""An event loop whose clock stands still while code runs, so that times do not depend on the
machine or its load."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")
FAR = 1.0  # seconds: longer sleeps are time limits, not moments


class Selector(selectors.SelectSelector):
    """Advances the clock of its loop by the time that is slept, and `late` seconds more.

    Bytes need a moment even within one machine, so a loop with sockets waits `grace` real seconds
    for something to arrive before its clock moves, and a thousand times longer before a limit.
    """

    def __init__(self, late: float = 0.0, grace: float = 0.0) -> None:
        super().__init__()
        self.now, self.late, self.grace = 0.0, late, grace

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(self.grace if timeout < FAR else 1000 * self.grace)
        if not ready:
            self.now += timeout + self.late
        return ready


def new_loop(late: float = 0.0, grace: float = 0.0) -> asyncio.SelectorEventLoop:
    selector = Selector(late, grace)
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    return loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on such a clock, with time for sockets."""
    with asyncio.Runner(loop_factory=lambda: new_loop(grace=0.01)) as runner:
        return runner.run(work)


def stop(seconds: float) -> None:
    """Block the loop, as `time.sleep` does."""
    asyncio.get_running_loop()._selector.now += seconds  # type: ignore[attr-defined]


# In place of the module `time`: whatever clock the running loop has.
TIME = SimpleNamespace(
    perf_counter=lambda: asyncio.get_running_loop().time(),
    time=time.time,
    process_time=time.process_time,
)
