"""What an engine writes down about each forward pass, so that tests and reports can see what was really run."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """One forward pass: how many sequences took part, and how many tokens went through it.

    `prefill_tokens` are prompt tokens computed in this pass, `decode_tokens` are tokens generated earlier that this
    pass computes. `seconds` covers the pass and the sampling after it. `wasted_tokens` went through the model for
    nobody: the padding of short prompts, and rows that had ended.
    """

    rows: int
    prefill_tokens: int
    decode_tokens: int
    seconds: float
    wasted_tokens: int = 0


class Stopwatch:
    """Times the block of a `with` statement; `seconds` is the duration of the last one."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
