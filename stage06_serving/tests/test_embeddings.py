"""/v1/embeddings and /v1/rerank, with OpenAI's client, against the model's own hidden states."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import normalize

from stage01_forward import families
from stage01_forward.attention import Recompute
from stage06_serving.scoring import EmbeddedRequest

from .asking import OTHER, PROMPT, TOKENIZER, complete, post
from .tools import prompt_of, started, submit, words

TEXTS = [PROMPT, OTHER, "hill " * 60]


@pytest.fixture(scope="module")
def hidden():
    """hidden(text) -> (T, C): the hidden states of the embedded model, computed at once."""
    model = families.load_model(families.load("stories"))

    def compute(text):
        ids = torch.tensor(TOKENIZER.encode(text))
        with torch.inference_mode():
            return model(ids, torch.arange(len(ids)), Recompute().attend)

    return compute


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_models_hidden_states(client, hidden, pooling):
    """As base64, which OpenAI's client asks for by default, and as numbers; while text streams."""
    want = [states[-1] if pooling == "last" else states.mean(0) for states in map(hidden, TEXTS)]
    expected = normalize(torch.stack(want), dim=1)
    stream = complete(client, stream=True, max_tokens=60, extra_body={"ignore_eos": True})
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(
            model="stories", input=TEXTS, extra_body={"pooling": pooling}, **options
        )
        got = torch.tensor([item.embedding for item in answer.data])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        assert answer.usage.prompt_tokens == sum(len(TOKENIZER.encode(text)) for text in TEXTS)
    assert len(list(stream)) > 1
    ids = client.embeddings.create(model="stories", input=TOKENIZER.encode(PROMPT))
    alone = client.embeddings.create(model="stories", input=PROMPT)
    assert ids.data[0].embedding == alone.data[0].embedding


def test_rerank_sorts_documents_by_cosine(server, hidden):
    query, documents = PROMPT, [OTHER, PROMPT, "hill " * 60]
    body = {"query": query, "documents": documents}
    results = post(server, "/v1/rerank", json=body).json()["results"]
    unit = {text: normalize(hidden(text)[-1], dim=0) for text in {query, *documents}}
    want = sorted(((float(unit[query] @ unit[text]), text) for text in documents), reverse=True)
    assert [result["document"]["text"] for result in results] == [text for _, text in want]
    for result, (score, _) in zip(results, want, strict=True):
        assert result["relevance_score"] == pytest.approx(score, abs=1e-4)
    assert results[0]["index"] == 1 and results[0]["relevance_score"] == pytest.approx(1)
    few = post(server, "/v1/rerank", json=body | {"top_n": 1, "return_documents": False}).json()
    assert [result["index"] for result in few["results"]] == [1]
    assert "document" not in few["results"][0]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        *((("embeddings"), {"input": wrong}, "input") for wrong in ("", [], [""], [99999], 7)),
        ("embeddings", {"input": "x", "dimensions": 7}, "dimensions"),
        ("embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ("embeddings", {"input": "word " * 2000}, "input"),
        ("rerank", {"query": "x", "documents": []}, "documents"),
        ("rerank", {"documents": ["x"]}, "query"),
    ],
)
def test_wrong_bodies(server, path, body, field):
    answer = post(server, f"/v1/{path}", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


async def test_means_of_chunks_and_after_preemptions(engine):
    """Seven tokens a step, and memory for a part of all requests: some run twice."""
    wants, prompts = partial(EmbeddedRequest, mean=True), [prompt_of(40, i) for i in range(4)]
    made = engine(blocks=20, max_sequences=6, token_budget=7)
    model, vectors = made.engine.runner.runner.model, []
    async with started(made) as running:
        streams = [submit(running, prompt_of(6, 9 + i), 30) for i in range(3)]
        groups = running.submit(prompts, [words(1)], wants=wants)
        vectors = [await running.result(ticket) for (ticket,) in groups]
        assert all(stream.error is None for stream in streams)
    assert made.status.preemptions
    for prompt, vector in zip(prompts, vectors, strict=True):
        ids = torch.tensor(prompt)
        with torch.inference_mode():
            states = model(ids, torch.arange(len(ids)), Recompute().attend)
        want = normalize(states.mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(vector, dtype=want.dtype), want)
