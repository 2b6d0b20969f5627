"""The contract of engines with a Llama: query heads that share keys, wider than C / H. Stage 01,
whose logits are those of transformers, is its oracle.

By -m slow: test_window.py has such heads too, and a sliding window.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from stage04_continuous.tests import oracle
from stage04_continuous.tests import test_contract as slots
from stage04_continuous.tests.lives import live
from stage05_paged.tests import test_contract as paged
from stage08_llama.config import LlamaConfig

GROUPED = LlamaConfig(101, 64, 24, 2, 6, 2, 8, n_inner=40, qk_norm=True, name="wide")
pytestmark = pytest.mark.slow
SHAPES = {"grouped": GROUPED, "window": replace(GROUPED, windows=(9, 9))}  # of later stages' tests


@pytest.fixture(scope="module", autouse=True)
def grouped():
    with oracle.shape(GROUPED):
        yield


class TestSlots(slots.TestSlots):
    pass


class TestPaged(paged.TestPaged):
    pass


def test_lives_of_fifty_calls():
    live(paged.PagedLife, 100)


test_the_answers_are_worth_comparing = slots.test_the_answers_are_worth_comparing
