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
from stage06_serving.errors import TYPES, ApiError, error_body, validation_message
from stage06_serving.protocol import REFUSED, ChatBody, CompletionBody, GenerateBody, TokenizeBody

LARGEST_ERROR = 2048  # bytes
# Lowest, highest, and whether the lowest itself is allowed.
PENALTIES = dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 2, True))
NUMBERS: dict[str, Any] = {**PENALTIES, "top_p": (0, 1, False), "min_p": (0, 1, True)}
NUMBERS |= {"temperature": (0, 2, True), "repetition_penalty": (0.01, 100, True)}
INTEGERS = {**dict.fromkeys(("max_tokens", "min_tokens"), (0, 1_000_000)), "top_k": (-1, 1_000_000)}
INTEGERS |= {"seed": (-(2**63), 2**63 - 1), "n": (1, 16), "logprobs": (0, 20)}
BOOLEANS = ("stream", "echo", "ignore_eos", "include_stop_str_in_output", "return_token_ids")
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = PLAIN | st.lists(PLAIN, max_size=5) | st.dictionaries(st.text(max_size=5), PLAIN)
USER = [{"role": "user", "content": "a"}]
examples = settings(deadline=None, derandomize=True)


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody(**{"prompt": "a", "temperature": 1.0, **fields})


def refused(kind: type[protocol.Body], **fields: Any) -> list[Any]:
    """Pydantic's errors, as FastAPI passes them on. Fails if there are none."""
    with pytest.raises(ValidationError) as error:
        kind(**fields)
    return [{**one, "loc": ("body", *one["loc"])} for one in error.value.errors()]


def named(kind: type[protocol.Body], **fields: Any) -> str | None:
    """The field that the error names."""
    return validation_message(refused(kind, **fields))[1]


# ---- bounds and strictness


@examples
@given(st.sampled_from(sorted(NUMBERS)), st.floats(-200, 200))
def test_numbers_are_within_their_bounds_or_refused(name, value):
    low, high, closed = NUMBERS[name]
    if (low <= value if closed else low < value) and value <= high:
        assert getattr(completion(**{name: value}).params(5, None, 0), name) == value
    else:
        assert named(CompletionBody, prompt="a", **{name: value}) == name


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_within_their_bounds_or_refused(name):
    low, high = INTEGERS[name]
    for value in (low, high, (low + high) // 2):
        assert getattr(completion(**{name: value}), name) == value
    for value in (low - 1, high + 1, -(2**70), 2**70):
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
@given(
    st.sampled_from(
        [CompletionBody, ChatBody, GenerateBody, TokenizeBody, protocol.DetokenizeBody]
    ),
    st.data(),
)
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


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *((kind, "prompt", "a \ud800") for kind in (CompletionBody, GenerateBody, TokenizeBody)),
        (CompletionBody, "prompt", ["a", "\udfff"]),
        *((CompletionBody, "stop", stop) for stop in ("\ud83d", ["b", "\ude00\ud83d"])),
        (ChatBody, "messages", [{"role": "user", "content": "\ud800"}]),
        (ChatBody, "messages", [{"role": "\ud800", "content": "a"}]),
        (ChatBody, "messages", [{"role": "a", "content": [{"type": "text", "text": "\ud800"}]}]),
    ],
)
def test_half_a_surrogate_pair_is_refused_and_named(kind, field, value):
    """JSON can express it and UTF-8 cannot: it has no tokens, and no answer can repeat it."""
    message, found = validation_message(refused(kind, **{"prompt": "a", field: value}))
    assert found == field and f"'{field}'" in message and "half of a surrogate pair" in message


# ---- no work without end


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *((CompletionBody, "prompt", [wrong] * 50_000) for wrong in ("", -1)),
        *((CompletionBody, "prompt", value) for value in ([[-1] * 50_000], [[""] * 1000] * 32)),
        *((CompletionBody, name, [""] * 50_000) for name in ("stop", "stop_token_ids")),
        (CompletionBody, "logit_bias", {str(id): "" for id in range(50_000)}),
        (ChatBody, "messages", [5] * 50_000),
        (ChatBody, "messages", [{"role": "user", "content": [5] * 1000}] * 900),
        (protocol.DetokenizeBody, "tokens", [""] * 50_000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_body_full_of_errors_has_few(kind, field, value):
    """A body of 1 MB with an error in each of its items kept the event loop busy for 5 seconds."""
    assert len(refused(kind, **{"prompt": "a", field: value})) < 30


def test_lists_are_bounded():
    assert len(completion(prompt=["a"] * 1024).prompts) == 1024
    assert completion(stop=["a" * 256] * 4).stops == ["a" * 256] * 4
    for kind, name, values in (
        (CompletionBody, "prompt", (["a"] * 1025, [[5]] * 1025)),
        *((kind, "n", (17, 2**62)) for kind in (CompletionBody, ChatBody)),
        (ChatBody, "messages", (USER * 1001,)),
        (CompletionBody, "stop", (["a"] * 5, "a" * 257, ["a" * 257], "", [""])),
    ):
        for value in values:
            fields = {"prompt": "a", "messages": USER, name: value}
            message, field = validation_message(refused(kind, **fields))
            assert field == name
            assert name != "stop" or "at most 4" in message and "1 to 256 characters" in message


# ---- meaning


def test_the_defaults_are_openais():
    params = CompletionBody(prompt="a").params(7, 3, 0)
    assert (params.temperature, params.top_p, params.seed) == (1, 1, None)
    assert (params.max_tokens, params.logprobs) == (7, 3)
    assert CompletionBody(prompt="a", temperature=0).params(7, None, 0).greedy


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(5, [5, 6, 7]), (2**63 - 1, [2**63 - 1, 0, 1]), (None, [None] * 3), (-1, [-1] * 3)],
)
def test_each_sample_has_a_seed_of_its_own(seed, seeds):
    """Without a seed, and with -1, each is drawn anew."""
    assert [completion(seed=seed).params(7, None, n).seed for n in range(3)] == seeds


@examples
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 15))
def test_every_seed_makes_valid_options_for_every_sample(seed, sample):
    assert completion(seed=seed).params(7, None, sample).generator()


def test_all_options_reach_the_sampler():
    fields = {"temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.2, "seed": 4}
    fields |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 2.0}
    fields |= {"ignore_eos": True, "min_tokens": 2}
    body = completion(**fields, stop_token_ids=[1, 2], logit_bias={"5": 1.5, "6": -2})
    params = body.params(7, 1, 0)
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.stop_token_ids == (1, 2) and params.logit_bias == {5: 1.5, 6: -2}
    with pytest.raises(UserError, match="min_tokens"):
        completion(min_tokens=8).params(7, None, 0)


# ---- errors


@examples
@given(st.sampled_from([*TYPES, 422, 499, 599]), st.text(st.characters()), st.integers(1, 10_000))
def test_an_error_is_small_whatever_its_message(status, text, times):
    """A body of 4 KB had made an error of 23 MB elsewhere. Halves of surrogate pairs have no UTF-8
    at all."""
    for message, param in ((text * times, None), ("😀" * times, "logit_bias")):
        body = error_body(status, message, param)
        for ascii, most in ((False, LARGEST_ERROR), (True, 2 * LARGEST_ERROR)):
            assert len(json.dumps(body, ensure_ascii=ascii).encode()) <= most
        assert {*body["error"]} == {"message", "type", "param", "code"}
        assert body["error"]["code"] == status
        assert ApiError(status, message, param).body() == body


def test_a_body_that_is_no_object_is_called_so():
    for name in ("json_invalid", "model_attributes_type"):
        bad = [{"type": name, "loc": ("body", 1), "msg": "..."}]
        assert validation_message(bad)[0].startswith("The body is not a JSON object")
    assert validation_message([])[0]


# ---- chat templates


def test_the_simple_template():
    parts: Any = [{"type": "text", "text": "U"}, {"type": "text", "text": "V"}]
    rows = [("system", "S"), ("user", parts), ("assistant", None), ("tool", "T")]
    messages = [protocol.Message(role=role, content=content) for role, content in rows]
    assert SIMPLE.prompt(messages) == "System: S\nUser: U\nV\nAssistant: \nTool: T\nAssistant:"
    assert SIMPLE.stops == ("\nUser:",)


@pytest.mark.parametrize("text", ["{content}", "{{ 7 * 7 }}", "{0.__class__}", "%s %(a)s", "${x}"])
def test_a_message_is_never_a_template(text):
    """CVE-2025-61620, CVE-2026-5760: a client's text was run as a template."""
    rows = (("user", text), (text, "x"))
    messages = [protocol.Message(role=role, content=content) for role, content in rows]
    assert SIMPLE.prompt(messages) == f"User: {text}\n{text.capitalize()}: x\nAssistant:"


def test_a_template_from_a_file(tmp_path):
    content = {"roles": {"user": "[{content}]"}, "start": ">", "stops": ["["]}
    (tmp_path / "chat.json").write_text(json.dumps(content), encoding="utf-8")
    template = load_template(str(tmp_path / "chat.json"))
    messages = [protocol.Message(role="user", content="a"), protocol.Message(role="b", content="c")]
    assert template and template.prompt(messages) == "[a]B: c\n>" and template.stops == ("[",)
    assert load_template("simple") is SIMPLE and load_template("none") is None


INVALID: list[dict[str, Any]] = [{"roles": {"user": "no content"}}, {"roles": {"user": 5}}]
INVALID += [{"roles": []}, {"start": 5}, *({"stops": stops} for stops in ([""], [5], "abc", 5))]
TEMPLATES = [json.dumps({"roles": {}, "start": "", "stops": []} | wrong) for wrong in INVALID]


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "{}", *TEMPLATES])
def test_a_file_that_is_not_a_template_is_refused(tmp_path, text):
    path = tmp_path / "chat.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="choose auto, simple, none, or a JSON file"):
        load_template(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    for name in (str(path), str(tmp_path), str(tmp_path / "absent"), "a\0b"):
        with pytest.raises(UserError, match="--chat-template"):
            load_template(name)
