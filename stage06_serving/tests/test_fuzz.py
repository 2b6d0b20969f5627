"""Bad requests: none is answered with 500 or more, hangs, or gets an error in a form of its own.

schemathesis makes valid and invalid ones from /openapi.json; raw bodies are good ones, damaged.
Answers are kept short: the time is for requests, not tokens.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from typing import Any

import httpx2
import hypothesis
import pytest

schemathesis = pytest.importorskip("schemathesis")

from schemathesis import GenerationMode

from stage06_serving.protocol import ErrorBody

from .asking import CHAT, HANG, LARGEST_ERROR

pytestmark = pytest.mark.slow
SHORT = 8  # tokens of an answer
ENDLESS = "/live"  # the event stream of the page ends with the server
FEW: dict[str, Any] = {"max_tokens": 2}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", {"prompt": "Once", **FEW, "temperature": 0.5, "stop": ["a", "b"]}),
    ("/v1/completions", {"prompt": ["Once"] * 2, **FEW, "n": 2, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], **FEW, "logit_bias": {"5": 1.5}, **STREAM}),
    ("/v1/chat/completions", {"messages": CHAT, **FEW, "logprobs": True, **STREAM}),
    ("/tokenize", {"prompt": "Once upon a time", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)
PIECES = (  # that have broken parsers
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"9" * 400, b"9" * 5000, b"\\ud83d", b"\\u0000"),
    *(b"\xff", b"\xed\xa0\xbd", b"\xef\xbb\xbf", b"\x00", b'"', b"{", b"}", b"[", b"]", b",", b":"),
    *(b"\\", b"null", b"[" * 3000, b'{"a":' * 3000, b"//", b"\n", b"{{7*7}}", b"1.", b"-"),
)


@pytest.fixture(scope="module")
def client(server):
    with httpx2.Client(base_url=server.url, timeout=HANG, trust_env=False) as client:
        yield client


def send(client: httpx2.Client, method: str, url: str, shown: Any = "", **options: Any) -> None:
    """Send a request, which `shown` describes, and check its answer."""
    answer = client.request(method, url, **options)
    what = f"{method} {url}: {answer.status_code}, {answer.text[:200]}; sent: {repr(shown)[:300]}"
    assert answer.status_code < 500, what
    if answer.status_code >= 400:
        error = ErrorBody.model_validate_json(answer.content).error
        assert error.code == answer.status_code and len(answer.content) <= LARGEST_ERROR, what
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert answer.content.endswith(b"data: [DONE]\n\n"), what
        assert b'data: {"error"' not in answer.content, what


def shortened(body: dict[str, Any]) -> dict[str, Any]:
    """The same body, but asking for a short answer. Invalid fields stay invalid."""
    limits = ("max_tokens", "max_completion_tokens")
    short = {name: SHORT for name in limits if type(body.get(name)) is int and body[name] > SHORT}
    if "messages" in body and all(body.get(name) is None for name in limits):
        short["max_completion_tokens"] = SHORT
    return body | short


def send_cases(client: httpx2.Client, operation: Any, count: int) -> None:
    """Half of them are valid by the schema; of the others, if there is one, the body is not."""
    short = itertools.cycle([False, True])

    def case_sent(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = shortened(case.body)
            if next(short):  # the name of another model ends a request early
                case.body.pop("model", None)
        options = case.as_transport_kwargs(base_url=str(client.base_url).rstrip("/"))
        content = json.dumps(options["json"]) if "json" in options else options.get("data")
        options = {"params": options["params"], "headers": dict(options["headers"])}
        send(client, case.method, case.formatted_path, content, content=content, **options)

    modes = [GenerationMode.POSITIVE]
    if operation.method == "post":  # any path is valid
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:
        settings = hypothesis.settings(
            max_examples=count,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        settings(hypothesis.given(operation.as_strategy(generation_mode=mode))(case_sent))()


@pytest.mark.parametrize("count", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_requests_from_the_schema(client, count):
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    results: Iterable[Any] = schema.exclude(path=ENDLESS).get_all_operations()
    operations = [result.ok() for result in results]  # raises if the schema is invalid
    assert len(operations) > 10
    for operation in operations:
        send_cases(client, operation, count)


def damaged(chance: random.Random, good: bytes) -> bytes:
    """A part of it, its parts the wrong way round, all of it twice, noise, or with pieces in it."""
    start, end = sorted(chance.choices(range(len(good) + 1), k=2))
    cuts = good[:start], good[start:end], good[end:] + good[:start], good + good
    noise = chance.randbytes(chance.choice((0, 1, 2, 10, 10_000)))
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(good) + 1)
        good = good[:place] + chance.choice(PIECES) + good[place + chance.randrange(4) :]
    return chance.choice((*cuts, noise, *[good] * 5))


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_bodies(client, count):
    chance, headers = random.Random(0), {"Content-Type": "application/json"}
    for _ in range(count):
        path, body = chance.choice(GOOD)
        content = damaged(chance, json.dumps(body).encode())
        send(client, "POST", path, content, content=content, headers=headers)
