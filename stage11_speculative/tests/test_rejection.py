"""Rejection sampling is exact: by enumeration of all that can happen, and by counting; and a draft
model that is the target itself is never refused."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from shared.errors import UserError
from shared.models import load_model
from shared.testing import random_checkpoint
from stage01_forward.attention import Recompute
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import distribution
from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import (
    CONFIG,
    DRAWN,
    ask,
    assert_answered,
    finish,
    prompt_of,
    the_model,
)
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make
from stage05_paged.fork import add_samples
from stage05_paged.tests.engines import engine_of, evict, preempt
from stage11_speculative import rejection
from stage11_speculative.__main__ import main
from stage11_speculative.engine import with_draft_model
from stage11_speculative.rejection import Draws


@pytest.mark.parametrize("seed", range(4))
def test_the_law_of_a_token_by_enumeration(seed):
    """Every draft, accepted or not, and every token drawn after it, with its probability."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, 5, dtype=torch.float64, generator=generator).pow(3)
    p, q = p.softmax(0), (9 * q).softmax(0)
    law = torch.zeros_like(p)
    for draft, chance in enumerate(q):
        share = float((p[draft] / chance).clamp(max=1))
        for dart in (0.0, share - 1e-9, share + 1e-9):  # so that is its probability
            if dart < 1:
                assert rejection.accept(p, q, draft, dart) == (dart < share)
        law[draft] += chance * share
        law += chance * (1 - share) * rejection.residual(p, q)
    assert (law - p).abs().max() < 1e-12


def test_a_draft_is_accepted_as_often_as_p_over_q():
    """The dart is below the quotient; a draft that p gives no chance is never accepted."""
    p, q = torch.tensor([0.25, 0.75, 0.0]), torch.tensor([0.5, 0.5, 0.0])
    darts = [place / 64 for place in range(64)]
    accepted = [sum(rejection.accept(p, q, draft, dart) for dart in darts) for draft in range(3)]
    assert accepted == [32, 64, 0]


def test_the_residual_is_what_p_has_and_q_lacks():
    p, q = torch.tensor([0.25, 0.75, 0.0, 0.0]), torch.tensor([0.5, 0.25, 0.0, 0.25])
    assert rejection.residual(p, q).tolist() == [0.0, 1.0, 0.0, 0.0]
    p, q = torch.tensor([0.5, 0.375, 0.125]), torch.tensor([0.25, 0.125, 0.625])
    assert rejection.residual(p, q).tolist() == [0.5, 0.5, 0.0]
    assert torch.equal(rejection.residual(p, p.clone()), p)  # nothing is left


def chi_square(counts: Counter[Any], expected: dict[Any, float], total: int) -> float:
    return sum((counts[key] - total * p) ** 2 / (total * p) for key, p in expected.items() if p)


def test_each_row_has_its_own_options_and_log_probabilities():
    """Requests of two kinds by turns, whose drafts were all drawn from one distribution."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(2, 12, dtype=torch.float64, generator=generator)
    (q,) = torch.randn(1, 12, dtype=torch.float64, generator=generator).softmax(1)
    kinds = [
        SamplingParams(temperature=1.2, top_p=0.8, logprobs=2),
        SamplingParams(temperature=1.0, min_p=0.1, logprobs=0),
    ]
    requests = [Request([1], replace(kinds[seed % 2], seed=seed)) for seed in range(6000)]
    drafts = torch.multinomial(q, len(requests), True, generator=generator).tolist()
    draws = {it: Draws(0, [draft], [q]) for it, draft in zip(requests, drafts, strict=True)}
    rows = logits.repeat(len(requests) // 2, 1)
    sampled = rejection.Rejection(draws)(requests, rows, [])
    for kind, params in enumerate(kinds):
        p, scores = distribution(logits[kind], params), logits[kind].log_softmax(0)
        law = {token: share for token, share in enumerate(p.tolist()) if share}
        counts = Counter(token for _, token, _ in sampled[kind::2])
        assert 3 < len(law) < 10 and counts.keys() <= law.keys()
        assert chi_square(counts, law, 3000) < 30  # at most 8 degrees of freedom
        best = scores.topk(params.logprobs or 0).indices.tolist()
        for _, token, logprobs in sampled[kind::2]:
            assert logprobs is not None and abs(logprobs.token - float(scores[token])) < 1e-9
            assert [id for id, _ in logprobs.top] == best


ALLOWED = range(8)
TEMPERATURE = 0.15  # so low that the models differ: each refuses many drafts of the other
OPTIONS: dict[str, Any] = {
    "temperature": TEMPERATURE, "ignore_eos": True, "logit_bias": dict.fromkeys(ALLOWED, 60.0),
}  # fmt: skip


def the_law() -> dict[Any, float]:
    """The probability of each pair of second and third tokens, from the model itself."""
    law = dict.fromkeys(product(ALLOWED, repeat=2), 0.0)

    def after(text: list[int]) -> list[float]:
        ids = torch.tensor(prompt_of(5) + text)
        hidden = the_model()(ids, torch.arange(len(ids)), Recompute().attend)
        return (the_model().logits(hidden[-1:])[0, :8] / TEMPERATURE).softmax(0).tolist()

    with torch.inference_mode():
        for first, second in product(ALLOWED, repeat=2):
            before = after([])[first] * after([first])[second]
            for third, chance in enumerate(after([first, second])):
                law[second, third] += before * chance
    return law


def small_draft() -> Any:
    """Another model, with other tokens in mind."""
    return load_model(random_checkpoint(CONFIG, seed=5, spread=24), dtype=torch.float64)


def test_the_joint_law_of_two_tokens_by_counting():
    """Eight tokens are allowed, so 64 pairs. A planted bias is found by the same measure."""
    expected, count = the_law(), 3000
    params = [SamplingParams(max_tokens=3, seed=seed, **OPTIONS) for seed in range(count)]

    def measure() -> float:
        plain = make(the_model(), pool=BlockPool(400, 4), max_sequences=64, token_budget=512)
        engine = with_draft_model(plain, small_draft(), most=2, draws=True)
        outputs = engine.generate([prompt_of(5)] * count, params)
        counts = engine.scheduler.draft_counts
        assert 0.3 < counts.accepted / counts.proposed < 0.8
        return chi_square(Counter(tuple(out.token_ids[1:]) for out in outputs), expected, count)

    assert measure() < 120  # 63 degrees of freedom: 2 in 100,000 are above
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection, "residual", lambda p, q: p)  # a refused token comes again
        assert measure() > 120


def test_a_draft_model_that_is_the_target_is_never_refused():
    """Nor behind a prefix hit, a fork, a swap or a preemption: its cache follows the target's."""
    for swap in (0, 60):
        engine = with_draft_model(engine_of(swap_blocks=swap), the_model(), most=3)
        requests = [ask(engine, 9, 20), ask(engine, 30, 20)]
        requests += add_samples(engine, prompt_of(14), [DRAWN, DRAWN])
        for step in range(6):
            if step == 3:
                preempt(engine, requests[1])
            engine.step()
        finish(engine)
        counts = engine.scheduler.draft_counts
        refused = counts.proposed - counts.accepted
        again = ask(engine, 30, 20)  # behind a hit
        finish(engine)
        assert counts.proposed - counts.accepted == refused
        assert engine.scheduler.counts.hit_tokens >= 28
        evict(engine, 5)
        requests += [again, ask(engine, 9, 20)]
        finish(engine)
        assert_answered(*requests)
        assert sum(request.sampling.greedy for request in requests) == 4
        assert counts.accepted > 40


def test_drawn_drafts_of_the_target_itself_are_all_accepted():
    """p is q, so whatever was drawn is accepted; its darts are others than the target's."""
    engine = with_draft_model(engine_of(), the_model(), most=3, draws=True)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    engine.generate([prompt_of(9), prompt_of(20)], params)
    counts = engine.scheduler.draft_counts
    assert counts.proposed == counts.accepted > 20


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"vocab_size": 50}, "small has 50 tokens and wide 101: choose one"),
        ({"n_positions": 32}, "small sees 32 tokens and wide 64: lower --max-model-len, or choose"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(fields, words):
    small = load_model(random_checkpoint(replace(CONFIG, name="small", **fields)))
    with pytest.raises(UserError, match=words):
        with_draft_model(engine_of(), small)


def test_the_trained_draft_model_drafts_for_stories_by_its_name(capsys):
    text = ["Once upon a time", "--max-tokens", "40", "--temperature", "0"]
    named = ["--speculate", "draft", "--speculative-model", "stories-draft"]
    answers = []
    for arguments in (text, [*text, *named], [*text, *named, "--drawn-drafts"]):
        assert main(arguments) == 0
        answers.append(re.sub(r"[\[\]]", "", capsys.readouterr().out))
    assert answers[0].startswith("Once upon a time") and len({*answers}) == 1
    for wrong in (named[2:], ["--drawn-drafts"]):
        with pytest.raises(UserError, match="give both or neither"):
            main([*text, *wrong])
