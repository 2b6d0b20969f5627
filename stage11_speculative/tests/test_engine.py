"""What drafts cost and save, pass by pass; and random lives with drafts, in scarce memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.config import Config
from shared.models import load_model
from shared.testing import random_checkpoint
from stage04_continuous.request import Request
from stage04_continuous.tests import lives
from stage04_continuous.tests.oracle import (
    DRAWN,
    PENALIZED,
    ask,
    assert_answered,
    finish,
    greedy,
    naive,
    prompt_of,
)
from stage05_paged.blocks import BlockPool
from stage05_paged.fork import add_samples
from stage05_paged.tests import test_contract as paged
from stage05_paged.tests.engines import assert_idle, engine_of, preempt
from stage09_kernels import library
from stage09_kernels.engine import make
from stage09_kernels.runner import KernelRunner
from stage10_quantization.convert import Quantize
from stage11_speculative.engine import with_draft_model, with_drafts
from stage11_speculative.proposers import NGram, Recorded
from stage11_speculative.suffix import Suffix

from .guesses import Guess


def drafting(right: float | None, most: int = 4, **options: Any) -> Any:
    return with_drafts(engine_of(**options), Guess(right), most)


@pytest.mark.parametrize("params", [greedy(23), replace(DRAWN, max_tokens=23)])
def test_right_drafts_save_passes_and_wrong_ones_cost_none(params):
    """23 tokens: with 4 right drafts a pass ceil(23 / 5) passes, with wrong ones 23."""
    for right, passes in ((1.0, 5), (0.0, 23), (None, 23)):
        engine = drafting(right)
        request = engine.add(Request(prompt_of(9), params))
        finish(engine)
        assert_answered(request)
        assert len(engine.steps) == passes
        counts = engine.scheduler.draft_counts
        if right:
            assert counts.accepted == counts.proposed == 23 - 5 and counts.per_position[0] == 5
        assert right or counts.accepted == 0


def test_drafts_end_before_max_tokens_and_before_the_context():
    engine = drafting(1.0, most=50)
    short, full = ask(engine, 9, 3), ask(engine, 58, 500)
    tokens = engine.step()
    assert_answered(short, full)
    assert Counter(id for id, _ in tokens) == {short.id: 3, full.id: 6}
    assert [row.decode_tokens for row in engine.steps[0].shares] == [2, 5]
    assert_idle(engine)


def test_drafts_take_only_what_the_budget_leaves():
    """Another prompt is read as fast as without them."""
    engine = drafting(1.0, sequences=4, budget=12)
    first = ask(engine, 9, 20)
    engine.step()
    assert len(first.output.token_ids) == 4  # 9 of the prompt, and 3 drafts
    ask(engine, 30, 4)
    engine.step()
    assert [row.prefill_tokens for row in engine.steps[1].shares] == [0, 11]
    assert len(first.output.token_ids) == 5  # and no draft
    finish(engine)


def test_drafts_take_only_free_blocks():
    """7 of 8 blocks are taken, and the second request has a place for 7 drafts, not for 8."""
    engine = drafting(1.0, most=8, blocks=8, size=4, prefix_caching=False)
    requests = [ask(engine, 13, 4), ask(engine, 9, 20)]
    assert len(engine.step()) == 4 + 8
    finish(engine)
    assert engine.scheduler.counts.preemptions == 0
    assert_answered(*requests)
    assert_idle(engine)


def test_blocks_of_refused_drafts_are_given_back():
    engine = drafting(0.0, most=8, size=4)
    ask(engine, 4, 20)
    for expected in (2, 2, 2, 2, 3):  # for 5, 6, 7, 8 and 9 tokens
        engine.step()
        assert engine.scheduler.pool.owned == expected
    finish(engine)


def test_no_other_request_finds_a_draft():
    """A block that is full of drafts is published once they are verified, under the tokens that
    came."""
    engine = drafting(0.0, most=8, size=4)
    first = ask(engine, 7, 20)
    engine.step()
    wrong = Guess(0.0)._of(first, 8)
    pool = engine.scheduler.pool
    assert len(pool.by_digest) == 1  # of 7 tokens and one more, 4 are full and verified
    other = engine.add(Request(first.output.prompt_ids + wrong, greedy(2)))
    engine.step()
    assert engine.scheduler.counts.hit_tokens == 4
    finish(engine)
    assert_answered(first, other)
    engine = drafting(1.0, most=8, size=4)
    ask(engine, 7, 20)
    engine.step()  # 7 tokens and 8 drafts: three full blocks
    assert len(engine.scheduler.pool.by_digest) == 3


def test_an_end_within_the_drafts_is_a_stop_though_it_is_the_last_token():
    ends = 0
    for count in range(2, 12):
        end = naive(prompt_of(9), greedy(count)).token_ids[-1]
        engine = drafting(1.0)
        request = engine.add(Request(prompt_of(9), greedy(count, stop_token_ids=(end,))))
        finish(engine)
        assert_answered(request)
        assert request.output.finish_reason == "stop"
        ends += len(request.output.token_ids) == count and len(engine.steps) < count
    assert ends > 1


FORMATS = {  # dtype, weights, dtype of keys and values
    "float32": (torch.float32, "", None),
    "bfloat16": (torch.bfloat16, "", None),
    "int8": (torch.float32, "int8", None),
    "int4": (torch.float32, "int4", None),
    "int8, bfloat16": (torch.bfloat16, "int8", None),
    "int4, cache in int8": (torch.float32, "int4", torch.int8),
}


PROMPTS = [prompt_of(length) for length in (3, 9, 14, 30, 21)]
PARAMS = [greedy(16), replace(DRAWN, max_tokens=16), greedy(16), PENALIZED]
PARAMS += [replace(DRAWN, seed=1, max_tokens=16), replace(PENALIZED, seed=2, max_tokens=16)]
SWAP = {"swap_pool": BlockPool(40, 4)}


def life(engine: Any) -> list[list[int]]:
    """Answers to requests side by side, two of them samples of a prompt; some are preempted, and
    two come again, behind their prefixes."""
    requests = [engine.add(Request(*pair)) for pair in zip(PROMPTS[:4], PARAMS[:4], strict=True)]
    requests += add_samples(engine, PROMPTS[4], PARAMS[4:])
    for step in range(4):
        engine.step()
        if step > 1:
            preempt(engine, engine.scheduler.running[step - 3])
    finish(engine)
    requests += [engine.add(Request(*pair)) for pair in zip(PROMPTS[2:4], PARAMS[2:4], strict=True)]
    finish(engine)
    assert_idle(engine)
    counts = engine.scheduler.counts
    assert counts.preemptions > 1 and counts.hit_tokens > 24
    return [request.output.token_ids for request in requests]


@pytest.mark.skipif(not library.compiler(), reason="no C compiler (cc, gcc, clang)")
@pytest.mark.parametrize("format", FORMATS)
def test_with_the_kernels_tokens_are_equal_in_every_format(format, monkeypatch):
    """Not only up to near ties: the kernels' bits do not depend on the number of rows."""
    monkeypatch.setattr("stage11_speculative.suffix.SHORTEST", 1)
    dtype, weights, kv_dtype = FORMATS[format]
    checkpoint = random_checkpoint(Config(101, 64, 64, 2, 2), spread=24)
    checkpoint.conversion = Quantize(weights) if weights else None
    model = load_model(checkpoint, dtype=dtype)

    def engine(**swap: Any) -> Any:
        pool = BlockPool(60, 4)
        return make(model, pool=pool, dtype=kv_dtype, insist=True, sanitize=True, **swap)

    want = life(engine())
    assert len({id for ids in want for id in ids}) > 20
    known = dict(zip(map(tuple, PROMPTS), want[:5], strict=True))
    with_model = with_draft_model(engine(), model, most=3)
    draft: Any = with_model.observers[-1]
    assert isinstance(draft.runner, KernelRunner)
    for drafting in (
        with_drafts(engine(), Recorded(known, 0.8, 101)),
        with_drafts(engine(**SWAP), Recorded(known, 0.2, 101)),
        with_drafts(engine(**SWAP), NGram(2, 1)),
        with_drafts(engine(), Suffix()),
        with_model,
    ):
        assert life(drafting) == want
        assert drafting.scheduler.draft_counts.proposed > 20


def test_an_n_gram_is_continued_as_the_last_time():
    proposer = NGram(3, 2)
    request = Request([1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2], greedy(9))
    assert proposer.propose([request], [3]) == [[3, 9, 1]]
    request.output.token_ids.append(3)
    assert proposer.propose([request], [9]) == [[9, 1, 2, 3]]  # 1 2 3 came last before 9
    assert proposer.propose([Request([7, 8, 9], greedy(9))], [9]) == [[]]
    assert proposer.propose([request], [0]) == [[]]
    longer = Request([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], greedy(9))
    assert proposer.propose([longer], [2]) == [[4, 9]]  # 2 3 came later, but 1 2 3 is longer
    proposer.forget(request)
    assert request not in proposer.ends and request not in proposer.indexed


class DraftLife(paged.PagedLife):
    """The answers and the sanitizer judge; a plan is stage 05's up to its drafts."""

    def make(self, sequences, token_budget, **options):
        plain = super().make(sequences, token_budget, **options)
        return with_drafts(plain, Guess(0.6), most=5)

    def before(self, plan):
        self.plan = plan
        work = [engine_work(plan, share) for share in plan.work]
        assert sum(share.count for share in plan.work) <= self.scheduler.token_budget
        self.seen["drafts"] += bool(plan.drafts)
        self.seen["several in a pass"] += len(plan.drafts) > 1
        assert {share.request for share in work if share.rows} >= set(plan.drafts)

    def _step(self):
        for id, token in self.engine.step():
            self.sent[id].append(token.id)
        self.seen["accepted"] += bool(getattr(self.plan, "accepted", None))


def engine_work(plan, share):
    count = len(plan.drafts.get(share.request, ()))
    return replace(share, count=share.count - count, rows=share.rows - count)


@pytest.mark.parametrize(
    "examples", [8, pytest.param(1500, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_lives_of_fifty_calls(examples):
    seen = lives.live(DraftLife, examples)
    assert all(seen[event] for event in ("drafts", "several in a pass", "accepted"))
