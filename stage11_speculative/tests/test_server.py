"""The server with drafts, asked by OpenAI's client: the same answers, and counts of drafts."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import openai
import pytest
import torch

from shared import cli, models
from shared.errors import UserError
from shared.models import STORIES
from shared.server import own_server
from shared.tokenizer import Tokenizer
from stage01_forward.attention import Recompute
from stage01_forward.params import SamplingParams
from stage05_paged.engine import make
from stage06_serving.__main__ import make_engine
from stage06_serving.app import Api
from stage06_serving.engines import Paged
from stage06_serving.forms import NoForms
from stage06_serving.inside import Inside
from stage06_serving.protocol import CompletionBody
from stage06_serving.service import Answer, Choice, Service
from stage06_serving.settings import parse
from stage06_serving.tests.conftest import FEW_BLOCKS, house
from stage06_serving.tests.tools import started
from stage11_speculative.engine import with_drafts
from stage11_speculative.lengths import Fixed
from stage11_speculative.proposers import Recorded
from stage11_speculative.rejection import Rejection

from .test_rejection import chi_square

__all__ = ["house"]

STORY = "Once upon a time there was a small fox called Pim. Once upon a time there was"
FIELDS: dict[str, Any] = {"model": "stories", "prompt": STORY, "max_tokens": 60}
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "n": 2},
    {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 0, "stop": [". The", " fox c"]},
    {"temperature": 0, "logit_bias": {"13": -100}, "extra_body": {"min_tokens": 20}},
]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def answers(url: str) -> list[Any]:
    """Each request twice, so that past answers can draft the second; the last as a stream."""
    told: list[Any] = []
    with client_of(url) as client:
        for fields in [*ASKED, *ASKED]:
            made = client.completions.create(**FIELDS, **fields)
            told.append([(c.text, c.finish_reason, scores(c)) for c in made.choices])
        stream = client.completions.create(**FIELDS, temperature=0, stream=True)
        told.append("".join(chunk.choices[0].text for chunk in stream))
    return told


def scores(choice: Any) -> Any:
    return choice.logprobs and (choice.logprobs.tokens, choice.logprobs.token_logprobs)


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[list[Any], dict[str, float]]]:
    """A server's answers without drafts, and its counts."""
    with own_server(quiet=True) as server:
        yield answers(server.url), counts(server.url)


def counts(url: str) -> dict[str, float]:
    """The samples about drafts, without their model."""
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(r"^\w+:(\w*spec_decode\w*)\{(.*?)\} (\S+)$", text, re.MULTILINE)
    return {
        name + "".join(re.findall(r'(?:position|le)="(.*?)"', labels)): float(value)
        for name, labels, value in found
    }


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("ngram", "draft")]


@pytest.mark.parametrize("kind", ["suffix", *SLOW])
def test_answers_are_those_without_drafts_and_the_counts_agree(kind, plain):
    model = ["--speculative-model", "stories-draft"] if kind == "draft" else []
    options = ["--speculate", kind, "--num-speculative-tokens", "3", *model]
    small = ["--sanitize", "--kv-memory", "8MiB"]  # the sanitizer reads all of it at each step
    with own_server([*options, *small], quiet=True) as server:
        assert answers(server.url) == plain[0]
        found = counts(server.url)
        assert f"{kind}, at most 3 in a step" in server.stderr()
    accepted, proposed = (
        found[f"spec_decode_num_{name}_tokens_total"] for name in ("accepted", "draft")
    )
    assert 0 < accepted <= proposed <= 3 * found["spec_decode_num_drafts_total"]
    places = [found.get(f"spec_decode_num_accepted_tokens_per_pos_total{i}", 0) for i in range(4)]
    assert sum(places) == accepted and places == sorted(places, reverse=True) and not places[3]
    length = "request_spec_decode_acceptance_length"
    requests = sum(fields.get("n", 1) for fields in ASKED) * 2 + 1
    assert found[f"{length}_count"] == requests == found[f"{length}_bucket+Inf"]
    assert requests < found[f"{length}_sum"] < 4 * requests


def test_drawn_drafts_keep_the_distribution_of_answers():
    """A pair of tokens, of four allowed ones each, as often as the model itself says. Greedy
    answers stay."""
    model: Any = models.load_model(models.load("stories"), dtype=torch.float32)
    prompt = Tokenizer.from_folder(STORIES).encode("Once upon a time there was a small")
    greedy = {**FIELDS, "prompt": prompt, "temperature": 0, "max_tokens": 30}

    def scores(ids: list[int]) -> torch.Tensor:
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend)
        return model.logits(hidden[-1:])[0].double()

    with torch.inference_mode():
        allowed = scores(prompt).topk(4).indices.tolist()
        law = {
            (first, second): float(before * after)
            for first, before in zip(allowed, scores(prompt)[allowed].softmax(0), strict=True)
            for second, after in zip(
                allowed, scores([*prompt, first])[allowed].softmax(0), strict=True
            )
        }
    law = {pair: chance for pair, chance in law.items() if chance > 0.005}
    options = "--speculate draft --speculative-model stories-draft --drawn-drafts"
    inside = Inside([*options.split(), *FEW_BLOCKS])
    inside.engine.scheduler.lengths = Fixed()  # all drafts, whatever a pass takes here
    body = {**FIELDS, "prompt": prompt, "max_tokens": 3, "n": 4, "return_token_ids": True}
    body |= {"logit_bias": {str(id): 100 for id in allowed}, "ignore_eos": True}

    async def answers() -> list[dict[str, Any]]:
        async with inside.serving() as url, httpx.AsyncClient(timeout=60) as client:
            asked = [{**body, "seed": 10 * seed} for seed in range(120)] + [greedy]
            path = f"{url}/v1/completions"
            return [(await client.post(path, json=fields)).json() for fields in asked]

    *sampled, last = asyncio.run(answers())
    found = Counter(tuple(it["token_ids"][:2]) for one in sampled for it in one["choices"])
    count = sum(found.values())
    assert count == 480 and sum(law.values()) > 0.95
    assert chi_square(found, law, count) < 50  # at most 15 degrees of freedom
    assert inside.engine.scheduler.draft_counts.accepted > 100
    assert isinstance(inside.engine.verify, Rejection)
    (plain,) = make(model, 1).generate([prompt], SamplingParams(max_tokens=30))
    text = Tokenizer.from_folder(STORIES).decode(plain.token_ids)
    assert last["choices"][0]["text"] == text


def test_a_stop_string_ends_an_answer_at_any_place_of_accepted_drafts():
    """Its text, its tokens and its reason are those of a token a step, at the last one, too."""
    options = cli.generation_parser("x", "").parse_args(["--model", "stories"])
    loaded = cli.load_model_from(options)
    decode, prompt = loaded.tokenizer.decode, loaded.tokenizer.encode("Once upon a time")
    (whole,) = make(loaded.model, 1).generate([prompt], SamplingParams(max_tokens=24))
    ids = whole.token_ids
    known = Recorded({tuple(prompt): ids}, 1.0, loaded.config.vocab_size)
    places = product(range(1, 23, 2), (0, 24))
    tried = [(decode(ids[place : place + 2]), most or place + 2) for place, most in places]

    async def answers() -> list[tuple[Choice, Answer]]:
        engine: Any = Paged(with_drafts(make(loaded.model, 1), known, 8))
        async with started(engine) as running:
            service = Service(running, loaded, "it", None, NoForms(engine, loaded, None), 60.0)
            given = []
            for stop, most in tried:
                sent: dict[str, Any] = {"prompt": prompt, "max_tokens": most, "stop": stop}
                body = CompletionBody(**sent, temperature=0)
                choices = await service.complete(body, b"")
                (answer,) = await Api(service)._answers(choices)
                given.append((choices[0], answer))
            return given

    for (stop, _), (choice, answer) in zip(tried, asyncio.run(answers()), strict=True):
        count = next(n for n in range(1, 25) if stop in decode(ids[:n]))
        assert [token.id for token in answer.tokens] == ids[:count]
        assert answer.text == decode(ids[:count]).partition(stop)[0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert choice.completion_tokens == count


def test_without_drafts_there_are_no_counts(plain):
    assert not plain[1]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--speculate", "oracle"], "--speculate: choose one of off, ngram, suffix, draft"),
        (["--speculate", "draft"], "--speculative-model NAME need each other"),
        (["--speculative-model", "stories"], "need each other: give both or neither"),
        (["--speculate", "ngram", "--num-speculative-tokens", "0"], "--num-speculative-tokens: "),
        (["--speculate", "draft", "--speculate=ngram"], "--speculate has several values"),
        (["--speculate", "ngram", "--drawn-drafts"], "--drawn-drafts needs --speculate draft"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(options, words):
    with pytest.raises(UserError, match=re.escape(words)):
        make_engine(parse(options))
