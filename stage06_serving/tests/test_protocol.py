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
from stage06_serving.chat import SIMPLE, load_template
from stage06_serving.errors import TYPES, ApiError, error_body, validation_message
from stage06_serving.protocol import (
    MOST_BIASES,
    REFUSED,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    Message,
    TokenizeBody,
)

LARGEST_ERROR = 2048  # bytes
NUMBERS = {  # lowest, highest, and whether the lowest itself is allowed
    "temperature": (0, 2, True),
    "top_p": (0, 1, False),
    "min_p": (0, 1, True),
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "repetition_penalty": (0.01, 100, True),
}
INTEGERS = {
    "max_tokens": (0, 1_000_000),
    "min_tokens": (0, 1_000_000),
    "top_k": (-1, 1_000_000),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, 16),
    "logprobs": (0, 20),
}
BOOLEANS = ("stream", "echo", "ignore_eos", "include_stop_str_in_output", "return_token_ids")
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = st.recursive(
    PLAIN,
    lambda inside: (
        st.lists(inside, max_size=5) | st.dictionaries(st.text(max_size=5), inside, max_size=5)
    ),
    max_leaves=9,
)
USER = [{"role": "user", "content": "a"}]


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody(**{"prompt": "a", "temperature": 1.0, **fields})


def refused(kind: type[Body], **fields: Any) -> list[Any]:
    """Pydantic's errors, as FastAPI passes them on. Fails if there are none."""
    with pytest.raises(ValidationError) as error:
        kind(**fields)
    return [{**one, "loc": ("body", *one["loc"])} for one in error.value.errors()]


def named(kind: type[Body], **fields: Any) -> str | None:
    """The field that the error names."""
    return validation_message(refused(kind, **fields))[1]


# ---- bounds and strictness


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(sorted(NUMBERS)), st.floats(-200, 200))
def test_numbers_are_within_their_bounds_or_refused(name, value):
    low, high, closed = NUMBERS[name]
    if (low <= value if closed else low < value) and value <= high:
        assert getattr(completion(**{name: value}).params(5, None, 0), name) == value
    else:
        assert named(CompletionBody, prompt="a", **{name: value}) == name


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(sorted(INTEGERS)), st.integers(-(2**70), 2**70) | st.integers(-30, 30))
def test_integers_are_within_their_bounds_or_refused(name, value):
    low, high = INTEGERS[name]
    if low <= value <= high:
        assert getattr(completion(**{name: value}), name) == value
    else:
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
    most = {str(id): 1 for id in range(MOST_BIASES)}
    assert len(completion(logit_bias=most).params(5, None, 0).logit_bias) == MOST_BIASES


def test_null_is_the_default():
    names = [name for name in CompletionBody.model_fields if name != "prompt"]
    assert CompletionBody(prompt="a", **dict.fromkeys(names)) == CompletionBody(prompt="a")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields_may_be_sent_empty(name):
    nothing: list[Any] = [None, [], {}, "", False]
    for empty in nothing:
        CompletionBody.model_validate({"prompt": "a", name: empty})
    assert name in validation_message(refused(CompletionBody, prompt="a", **{name: "x"}))[0]


@settings(deadline=None, derandomize=True)
@given(
    st.sampled_from([CompletionBody, ChatBody, GenerateBody, TokenizeBody, DetokenizeBody]),
    st.data(),
)
def test_any_body_is_accepted_or_refused_briefly(kind, data):
    """Nothing else is raised. An error does not repeat the body: a log or a page may show it."""
    names = st.sampled_from([*kind.model_fields, "tools", "anything"])
    markers = st.just("marker" * 200) | st.just(["marker" * 200] * 3)
    fields = data.draw(st.dictionaries(names, VALUES | markers, max_size=6))
    try:
        kind.model_validate(fields)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        message, field = validation_message(errors)
        assert "marker" not in message and (field is None or field in kind.model_fields)
        assert len(json.dumps(error_body(400, message, field)).encode()) < LARGEST_ERROR


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": "a \ud800 b"}),
        (CompletionBody, {"prompt": ["a", "\udfff"]}),
        (CompletionBody, {"stop": "\ud83d", "prompt": "a"}),
        (CompletionBody, {"stop": ["b", "\ude00\ud83d"], "prompt": "a"}),
        (GenerateBody, {"prompt": "\ud800"}),
        (TokenizeBody, {"prompt": "\ud800"}),
        (ChatBody, {"messages": [{"role": "user", "content": "\ud800"}]}),
        (ChatBody, {"messages": [{"role": "\ud800", "content": "a"}]}),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
        ),
    ],
)
def test_half_a_surrogate_pair_is_refused_and_named(kind, fields):
    """JSON can express it and UTF-8 cannot: it has no tokens, and no answer can repeat it."""
    message, field = validation_message(refused(kind, **fields))
    assert (
        field == [*fields][0] and f"'{field}'" in message and "half of a surrogate pair" in message
    )
    whole = json.loads(r'{"prompt": "\ud83d\ude00", "stop": ["\ud83d\ude00"]}')
    body = CompletionBody.model_validate(whole)
    assert (body.prompts, body.stops) == (["\N{GRINNING FACE}"], ["\N{GRINNING FACE}"])


# ---- no work without end


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [""] * 50_000}),
        (CompletionBody, {"prompt": [-1] * 50_000}),
        (CompletionBody, {"prompt": [[-1] * 50_000]}),
        (CompletionBody, {"prompt": [[""] * 1000] * 32}),
        (CompletionBody, {"prompt": "a", "stop": [5] * 50_000}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": [""] * 50_000}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(id): "" for id in range(50_000)}}),
        (ChatBody, {"messages": [5] * 50_000}),
        (ChatBody, {"messages": [{"role": "user", "content": [5] * 1000}] * 900}),
        (DetokenizeBody, {"tokens": [""] * 50_000}),
    ],
)
def test_a_body_full_of_errors_has_few(kind, fields):
    """A body of 1 MB with an error in each of its items kept the event loop busy for 5 seconds."""
    assert len(refused(kind, **fields)) < 30


def test_lists_are_bounded():
    assert len(completion(prompt=["a"] * 32).prompts) == 32
    for prompt in (["a"] * 33, [[5]] * 33):
        assert named(CompletionBody, prompt=prompt) == "prompt"
    for count in (17, 2**62):
        assert named(ChatBody, messages=USER, n=count) == "n"
        assert named(CompletionBody, prompt="a", best_of=count) == "best_of"
    refused(CompletionBody, prompt="a", n=1, best_of=2)
    assert completion(stop=["a" * 64] * 4).stops == ["a" * 64] * 4
    for stop in (["a"] * 5, "a" * 65, ["a" * 65], "", [""]):
        message, field = validation_message(refused(CompletionBody, prompt="a", stop=stop))
        assert field == "stop" and "at most 4" in message and "1 to 64 characters" in message


# ---- meaning


def test_prompts_of_every_form():
    for prompt, prompts in (
        ("a", ["a"]),
        ([5, 6], [[5, 6]]),
        (["a", "b"], ["a", "b"]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ):
        assert completion(prompt=prompt).prompts == prompts


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
    found = [completion(seed=seed).params(7, None, sample).seed for sample in range(3)]
    assert found == seeds


@settings(deadline=None, derandomize=True)
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


@settings(deadline=None, derandomize=True)
@given(
    st.sampled_from([*TYPES, 422, 499, 599]),
    st.text(st.characters(), max_size=2000)
    | st.sampled_from([letter * 10_000 for letter in "a\0é\ud800"]),
    st.sampled_from([None, "logit_bias"]),
)
def test_an_error_is_small_whatever_its_message(status, message, param):
    """A body of 4 KB had made an error of 23 MB elsewhere. Halves of surrogate pairs have no UTF-8
    at all."""
    body = error_body(status, message, param)
    for ascii in (True, False):
        assert len(json.dumps(body, ensure_ascii=ascii).encode()) <= LARGEST_ERROR
    assert {*body["error"]} == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    assert ApiError(status, message, param).body() == body
    longest = json.dumps(ApiError(503, "😀" * 10_000, param).body(), ensure_ascii=False)
    assert len(longest.encode()) <= LARGEST_ERROR


def test_the_message_names_the_field_and_what_to_send():
    assert named(CompletionBody) == "prompt"
    message, field = validation_message(refused(CompletionBody, prompt=5))
    assert field == "prompt" and "at most 32" in message
    for kind in (GenerateBody, TokenizeBody):  # there it can be nothing but text
        assert "valid string" in validation_message(refused(kind, prompt=["a"]))[0]
    options = {"include_usage": True}
    message, field = validation_message(refused(CompletionBody, prompt="a", stream_options=options))
    assert field is None and "'stream_options' needs 'stream': true" in message
    bad = [{"type": "json_invalid", "loc": ("body", 1), "msg": "..."}]
    assert (
        validation_message(bad)[0].startswith("The body is not JSON") and validation_message([])[0]
    )


# ---- chat templates


def test_the_simple_template():
    parts: Any = [{"type": "text", "text": "U"}, {"type": "text", "text": "V"}]
    rows = [("system", "S"), ("user", parts), ("assistant", None), ("tool", "T")]
    messages = [Message(role=role, content=content) for role, content in rows]
    assert SIMPLE.prompt(messages) == "System: S\nUser: U\nV\nAssistant: \nTool: T\nAssistant:"
    assert SIMPLE.stops == ("\nUser:",)


@pytest.mark.parametrize("text", ["{content}", "{{ 7 * 7 }}", "{0.__class__}", "%s %(a)s", "${x}"])
def test_a_message_is_never_a_template(text):
    """CVE-2025-61620, CVE-2026-5760: a client's text was run as a template."""
    assert SIMPLE.prompt([Message(role="user", content=text)]) == f"User: {text}\nAssistant:"
    other = SIMPLE.prompt([Message(role=text, content="x")])
    assert other == f"{text.capitalize()}: x\nAssistant:"


def test_a_template_from_a_file(tmp_path):
    content = {"roles": {"user": "[{content}]"}, "start": ">", "stops": ["["]}
    (tmp_path / "chat.json").write_text(json.dumps(content), encoding="utf-8")
    template = load_template(str(tmp_path / "chat.json"))
    messages = [Message(role="user", content="a"), Message(role="b", content="c")]
    assert template and template.prompt(messages) == "[a]B: c\n>" and template.stops == ("[",)
    assert load_template("simple") is SIMPLE and load_template("none") is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "5", "{}"),
        '{"roles": {"user": "no content"}, "start": "", "stops": []}',
        '{"roles": {"user": 5}, "start": "", "stops": []}',
        '{"roles": [], "start": "", "stops": []}',
        '{"roles": {}, "start": 5, "stops": []}',
        *(
            f'{{"roles": {{}}, "start": "", "stops": {stops}}}'
            for stops in ('[""]', "[5]", '"abc"', "5")
        ),
    ],
)
def test_a_file_that_is_not_a_template_is_refused(tmp_path, text):
    path = tmp_path / "chat.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="choose simple, none, or a JSON file"):
        load_template(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    for name in (str(path), str(tmp_path), str(tmp_path / "absent"), "a\0b"):
        with pytest.raises(UserError, match="--chat-template"):
            load_template(name)
