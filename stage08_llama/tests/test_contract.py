"""The contract of engines with a Llama: query heads that share keys, wider than C / H. Stage 01,
whose logits are those of transformers, is its oracle."""

from __future__ import annotations

import pytest

from stage04_continuous.tests import oracle
from stage04_continuous.tests.contract import Again
from stage05_paged.tests import test_contract as paged
from stage08_llama.config import LlamaConfig

GROUPED = LlamaConfig(101, 64, 24, 2, 6, 2, 8, n_inner=40, qk_norm=True, name="wide")


@pytest.fixture(scope="module", autouse=True)
def grouped():
    with oracle.shape(GROUPED):
        yield


class TestPaged(Again, paged.TestPaged):
    pass
