"""Ends a test that does not end: an endless loop in a student's copy, say."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator

from _pytest.outcomes import Failed

MOST = 100.0  # seconds of this process's processor time: waiting for a compiler does not count
AGAIN = 5.0  # once a test has been ended: the same loop is in the next ones
NEWS = 10.0  # seconds between two lines about a test that takes long


class Endless(Failed):
    """Raised in the middle of a test. No Exception, so that the test's code does not catch it."""

    def __init__(self) -> None:
        super().__init__("this has computed for too long: is the loop endless?")


@contextlib.contextmanager
def patience(test: str, say: Callable[[str], object], most: float, news: float) -> Iterator[None]:
    """Raise Endless in this thread once the block has computed for `most` seconds, and meanwhile
    `say` every `news` seconds what runs. What never returns to Python is not ended."""
    thread, over, begun = threading.get_ident(), threading.Event(), time.process_time()

    def watch() -> None:
        while not over.wait(news):
            taken = time.process_time() - begun
            if taken > most:
                what = ctypes.py_object(Endless)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
                return
            say(f"{test} has computed for {taken:.0f} s; it is ended at {most:.0f}")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        # Endless may come in here, if the block has just ended. Setting it back to NULL is no way
        # out: Python 3.11 then loops for ever in the next function that is traced.
        try:
            over.set()
            watcher.join()
        except Endless:
            pass
