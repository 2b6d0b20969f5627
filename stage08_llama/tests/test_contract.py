"""All scenarios with a Llama: query heads that share keys, wider than C / H. Stage 01, whose logits
are those of transformers, is the oracle."""

from __future__ import annotations

from shared.parity import prove
from stage01_forward.params import SamplingParams
from stage04_continuous.tests import oracle
from stage05_paged.tests.engines import assert_idle, engine_of
from stage08_llama.config import LlamaConfig

GROUPED = LlamaConfig(101, 64, 24, 2, 6, 2, 8, n_inner=40, qk_norm=True, name="wide")


def test_all_scenarios():
    with oracle.shape(GROUPED):
        model = oracle.the_model()
        engine = engine_of(4, 32, model=model)
        parity = prove(engine, oracle.oracle_of(model), SamplingParams)
    assert parity.sequences > 20 and not parity.near_ties
    assert_idle(engine)
