"""A clock that stands still while anybody works: what is measured on it is the same on any machine, however busy."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")
FAR = 1.0  # seconds: who sleeps longer waits for no moment, but has given somebody else a limit


class Selector(selectors.SelectSelector):
    """Turns the clock of its loop as far as is slept, and `late` seconds further.

    What has been sent may be on its way for a moment even within one machine, so a loop with sockets is given `grace` real
    seconds for something to arrive before its clock moves; and many more before somebody's limit is reached.
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
    """Let everything stand still for so long, as `time.sleep` does."""
    asyncio.get_running_loop()._selector.now += seconds  # type: ignore[attr-defined]


# In place of the module `time`: whatever clock the running loop has.
TIME = SimpleNamespace(
    perf_counter=lambda: asyncio.get_running_loop().time(),
    time=time.time,
    process_time=time.process_time,
)
