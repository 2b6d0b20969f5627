"""What a body may be, and what an error may contain: bounds, strictness, no work without end."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.errors import UserError
from stage06_serving import protocol
from stage06_serving.chat import SIMPLE, load_template
from stage06_serving.errors import error_body, validation_message
from stage06_serving.protocol import REFUSED, ChatBody, CompletionBody, GenerateBody, TokenizeBody

LARGEST_ERROR = 2048  # bytes
# The least and the most that is allowed.
PENALTIES = dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 2))
NUMBERS: dict[str, Any] = {**PENALTIES, "top_p": (5e-324, 1), "min_p": (0, 1)}
NUMBERS |= {"temperature": (0, 2), "repetition_penalty": (0.01, 100)}
INTEGERS = {**dict.fromkeys(("max_tokens", "min_tokens"), (0, 1_000_000)), "top_k": (-1, 1_000_000)}
INTEGERS |= {"seed": (-(2**63), 2**63 - 1), "n": (1, 16), "logprobs": (0, 20)}
BOOLEANS = ("stream", "echo", "ignore_eos", "include_stop_str_in_output", "return_token_ids")
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = PLAIN | st.lists(PLAIN, max_size=5) | st.dictionaries(st.text(max_size=5), PLAIN)
KINDS = [CompletionBody, ChatBody, GenerateBody, TokenizeBody, protocol.DetokenizeBody]
USER = [{"role": "user", "content": "a"}]
examples = settings(deadline=None, derandomize=True)


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody(**{"prompt": "a", "temperature": 1.0, **fields})


def refused(kind: Any, **fields: Any) -> list[Any]:
    """Pydantic's errors, as FastAPI passes them on. Fails if there are none."""
    with pytest.raises(ValidationError) as error:
        kind(**fields)
    return [{**one, "loc": ("body", *one["loc"])} for one in error.value.errors()]


def named(kind: Any, **fields: Any) -> str | None:
    """The field that the error names."""
    return validation_message(refused(kind, **fields))[1]


# ---- bounds and strictness


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
def test_numbers_are_within_their_bounds_or_refused(name):
    low, high = (NUMBERS | INTEGERS)[name]
    below, above = low - 1, high + 1
    if name in NUMBERS:
        below, above = math.nextafter(low, -9), math.nextafter(high, 999)
    for value in (low, high):
        assert getattr(completion(**{name: value}), name) == value
    for value in (below, above, -(2**70), 2**70):
        assert named(CompletionBody, prompt="a", **{name: value}) == name


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS, *BOOLEANS])
def test_types_are_strict(name):
    wrong: list[Any] = [math.nan, math.inf, -math.inf, "1", "true", [1], {"a": 1}]
    wrong += [0, 1, 1.0] if name in BOOLEANS else [True] if name in NUMBERS else [True, 1.0]
    for value in wrong:
        assert named(CompletionBody, prompt="a", **{name: value}) == name


def test_logit_bias_has_token_ids_and_numbers():
    for bias in (math.nan, math.inf, True, "1"):
        refused(CompletionBody, prompt="a", logit_bias={"5": bias})
    for id in ("٣", "1" * 10, "", "1.5", 5):
        refused(CompletionBody, prompt="a", logit_bias={id: 1})
    most = {str(id): 1 for id in range(protocol.MOST_BIASES)}
    assert len(completion(logit_bias=most).params(5, None, 0).logit_bias) == protocol.MOST_BIASES


@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields_may_be_sent_empty(name):
    nothing: list[Any] = [None, [], {}, "", False]
    for empty in nothing:
        CompletionBody.model_validate({"prompt": "a", name: empty})
    assert name in validation_message(refused(CompletionBody, prompt="a", **{name: "x"}))[0]


@examples
@given(st.sampled_from(KINDS), st.data())
def test_any_body_is_accepted_or_refused_briefly(kind, data):
    """Nothing else is raised. An error does not repeat the body: a log or a page may show it."""
    names = st.sampled_from([*kind.model_fields, "tools", "anything"])
    markers = st.just("marker" * 200) | st.just(["marker" * 200] * 3)
    try:
        kind.model_validate(data.draw(st.dictionaries(names, VALUES | markers, max_size=6)))
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        message, field = validation_message(errors)
        assert "marker" not in message and field in (None, "tools", *kind.model_fields)
        assert len(json.dumps(error_body(400, message, field)).encode()) < LARGEST_ERROR


def test_half_a_surrogate_pair_is_refused_and_named():
    """JSON can express it and UTF-8 cannot: it has no tokens, and no answer can repeat it."""
    half = "a \ud800"
    for kind, field, value in (
        *((kind, "prompt", half) for kind in (CompletionBody, GenerateBody, TokenizeBody)),
        *((CompletionBody, "prompt", ["a", "\udfff"]), (CompletionBody, "stop", half)),
        (CompletionBody, "stop", ["b", "\ude00\ud83d"]),
        (ChatBody, "messages", [{"role": "user", "content": half}]),
        (ChatBody, "messages", [{"role": half, "content": "a"}]),
        (ChatBody, "messages", [{"role": "a", "content": [{"type": "text", "text": half}]}]),
    ):
        message, found = validation_message(refused(kind, **{"prompt": "a", field: value}))
        assert found == field and f"'{field}'" in message and "half of a surrogate pair" in message


# ---- no work without end


def test_a_body_full_of_errors_has_few():
    """A body of 1 MB with an error in each of its items kept the event loop busy for 5 seconds.
    Long lists are allowed; how long they may be: test_errors."""
    assert len(completion(prompt=["a"] * 1024).prompts) == 1024
    assert completion(stop=["a" * 256] * 4).stops == ["a" * 256] * 4
    for kind, field, value in (
        *((CompletionBody, "prompt", [wrong] * 50_000) for wrong in ("", -1)),
        *((CompletionBody, "prompt", value) for value in ([[-1] * 50_000], [[""] * 1000] * 32)),
        *((CompletionBody, name, [""] * 50_000) for name in ("stop", "stop_token_ids")),
        (CompletionBody, "logit_bias", {str(id): "" for id in range(50_000)}),
        (ChatBody, "messages", [5] * 50_000),
        (ChatBody, "messages", [{"role": "user", "content": [5] * 1000}] * 900),
        (protocol.DetokenizeBody, "tokens", [""] * 50_000),
    ):
        assert len(refused(kind, **{"prompt": "a", field: value})) < 30, field


# ---- meaning


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(5, [5, 6, 7]), (2**63 - 1, [2**63 - 1, 0, 1]), (None, [None] * 3), (-1, [-1] * 3)],
)
def test_each_sample_has_a_seed_of_its_own(seed, seeds):
    """Without a seed, and with -1, each is drawn anew."""
    params = [completion(seed=seed).params(7, None, n) for n in range(3)]
    assert [each.seed for each in params] == seeds and all(each.generator() for each in params)


def test_all_options_reach_the_sampler():
    """Their defaults are OpenAI's."""
    params = CompletionBody(prompt="a").params(7, 3, 0)
    assert (params.temperature, params.top_p, params.seed) == (1, 1, None)
    assert (params.max_tokens, params.logprobs, params.greedy) == (7, 3, False)
    fields = {"temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.2, "seed": 4}
    fields |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 2.0}
    fields |= {"ignore_eos": True, "min_tokens": 2}
    body = completion(**fields, stop_token_ids=[1, 2], logit_bias={"5": 1.5, "6": -2})
    params = body.params(7, 1, 0)
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.stop_token_ids == (1, 2) and params.logit_bias == {5: 1.5, 6: -2}
    with pytest.raises(UserError, match="min_tokens"):
        completion(min_tokens=8).params(7, None, 0)


def test_an_error_is_small_whatever_its_message():
    """A body of 4 KB had made an error of 23 MB elsewhere. Half a surrogate pair has no UTF-8."""
    for text in ("😀" * 9999, "\ud800" * 9999):
        body = json.dumps(error_body(400, text, "logit_bias"), ensure_ascii=False)
        assert len(body.encode()) < LARGEST_ERROR


# ---- chat templates


@pytest.mark.parametrize("text", ["{content}", "{{ 7 * 7 }}", "{0.__class__}", "%s %(a)s", "${x}"])
def test_a_message_is_never_a_template(text):
    """CVE-2025-61620, CVE-2026-5760: a client's text was run as a template."""
    rows = (("user", text), (text, "x"))
    messages = [protocol.Message(role=role, content=content) for role, content in rows]
    assert SIMPLE.prompt(messages) == f"User: {text}\n{text.capitalize()}: x\nAssistant:"
    assert SIMPLE.stops == ("\nUser:",)


INVALID: list[dict[str, Any]] = [{"roles": {"user": "no content"}}, {"roles": {"user": 5}}]
INVALID += [{"roles": []}, {"start": 5}, *({"stops": stops} for stops in ([""], [5], "abc", 5))]
TEMPLATES = [json.dumps({"roles": {}, "start": "", "stops": []} | wrong) for wrong in INVALID]


def test_a_file_that_is_not_a_template_is_refused(tmp_path):
    path = tmp_path / "chat.json"
    for text in ("", "{", "[]", "5", "{}", *TEMPLATES, "\udcff"):  # the last is not UTF-8
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(UserError, match="choose auto, simple, none, or a JSON file"):
            load_template(str(path))
    for name in (str(tmp_path), str(tmp_path / "absent"), "a\0b"):
        with pytest.raises(UserError, match="--chat-template"):
            load_template(name)
