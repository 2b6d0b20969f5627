"""The record of a forward pass, for tests and reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """One forward pass over `rows` sequences.

    prefill_tokens: prompt tokens that it computed. decode_tokens: generated tokens that it
    computed. seconds: of the pass and the sampling after it. wasted_tokens: computed in vain, as
    padding of short prompts or for rows that had ended.
    """

    rows: int
    prefill_tokens: int
    decode_tokens: int
    seconds: float
    wasted_tokens: int = 0
