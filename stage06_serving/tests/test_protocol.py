"""What a body may be, and what an error may say: bounds, strictness, and no work or words without end."""

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
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inside: (
        st.lists(inside, max_size=5) | st.dictionaries(st.text(max_size=5), inside, max_size=5)
    ),
    max_leaves=9,
)


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody(**{"prompt": "a", "temperature": 1.0, **fields})


def refused(kind: type[Body], **fields: Any) -> list[Any]:
    """Pydantic's errors, as FastAPI hands them to us. Fails if there are none."""
    with pytest.raises(ValidationError) as error:
        kind(**fields)
    return [{**each, "loc": ("body", *each["loc"])} for each in error.value.errors()]


# ---- bounds and strictness ------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(sorted(NUMBERS)), st.floats(-200, 200))
def test_numbers_are_within_their_bounds_or_refused(name, value):
    low, high, closed = NUMBERS[name]
    if (low <= value if closed else low < value) and value <= high:
        assert getattr(completion(**{name: value}).params(5, None, 0), name) == value
    else:
        refused(CompletionBody, prompt="a", **{name: value})


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(sorted(INTEGERS)), st.integers(-(2**70), 2**70) | st.integers(-30, 30))
def test_integers_are_within_their_bounds_or_refused(name, value):
    """CVE-2026-21869: a negative number reached where none was thought of."""
    low, high = INTEGERS[name]
    if low <= value <= high:
        assert getattr(completion(**{name: value}), name) == value
    else:
        refused(CompletionBody, prompt="a", **{name: value})


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", True, [1], {"a": 1}])
def test_what_is_no_number_is_refused(name, value):
    assert validation_message(refused(CompletionBody, prompt="a", **{name: value}))[1] == name


@pytest.mark.parametrize("name", INTEGERS)
def test_a_float_is_no_integer(name):
    refused(CompletionBody, prompt="a", **{name: 1.0})


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("value", [0, 1, "true", "yes", [], 1.0])
def test_nothing_but_true_and_false_is_a_truth_value(name, value):
    refused(CompletionBody, prompt="a", **{name: value})


@pytest.mark.parametrize(
    "value",
    [
        {"5": math.nan},
        {"5": math.inf},
        {"5": True},
        {"٣": 1},
        {"1" * 10: 1},
        {"": 1},
        {"1.5": 1},
        {5: 1},
    ],
)
def test_logit_bias_has_token_ids_and_numbers(value):
    refused(CompletionBody, prompt="a", logit_bias=value)


def test_null_is_the_same_as_nothing():
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
def test_whatever_is_sent_is_taken_or_refused_in_few_words(kind, data):
    """Nothing else is raised. And an error does not repeat what it complains of: a log or a page may show it."""
    names = st.sampled_from([*kind.model_fields, "tools", "anything"])
    fields = data.draw(
        st.dictionaries(
            names, JSON | st.just("marker" * 200) | st.just(["marker" * 200] * 3), max_size=6
        )
    )
    try:
        kind.model_validate(fields)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        message, field = validation_message(errors)
        assert "marker" not in message and (field is None or field in kind.model_fields)
        assert len(json.dumps(error_body(400, message, field)).encode()) < LARGEST_ERROR


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        (CompletionBody, {"prompt": "a \ud800 b"}, "prompt"),
        (CompletionBody, {"prompt": ["a", "\udfff"]}, "prompt"),
        (CompletionBody, {"prompt": "a", "stop": "\ud83d"}, "stop"),
        (CompletionBody, {"prompt": "a", "stop": ["b", "\ude00\ud83d"]}, "stop"),
        (GenerateBody, {"prompt": "\ud800"}, "prompt"),
        (TokenizeBody, {"prompt": "\ud800"}, "prompt"),
        (ChatBody, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (ChatBody, {"messages": [{"role": "\ud800", "content": "a"}]}, "messages"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
            "messages",
        ),
    ],
)
def test_half_a_surrogate_pair_is_refused_and_named(kind, fields, field):
    """JSON can say it, and UTF-8 cannot: a tokenizer cannot cut it, and no answer can repeat it."""
    message = f"'{field}': it has half of a surrogate pair: send whole characters."
    assert validation_message(refused(kind, **fields)) == (message, field)


def test_a_whole_pair_is_a_character():
    body = CompletionBody.model_validate(
        json.loads(r'{"prompt": "\ud83d\ude00", "stop": ["\ud83d\ude00"]}')
    )
    assert (body.prompts, body.stops) == (["\N{GRINNING FACE}"], ["\N{GRINNING FACE}"])


# ---- no work without end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [""] * 50_000}),
        (CompletionBody, {"prompt": [-1] * 50_000}),
        (CompletionBody, {"prompt": [[-1] * 50_000]}),
        (CompletionBody, {"prompt": [[""] * 1000] * 32}),
        (CompletionBody, {"prompt": "a", "stop": [5] * 50_000}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": [""] * 50_000}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(each): "" for each in range(50_000)}}),
        (ChatBody, {"messages": [5] * 50_000}),
        (ChatBody, {"messages": [{"role": "user", "content": [5] * 1000}] * 900}),
        (DetokenizeBody, {"tokens": [""] * 50_000}),
    ],
)
def test_a_body_full_of_errors_makes_few(kind, fields):
    """Error amplification: a body of 1 MB with an error in each of its items kept the event loop busy for five seconds."""
    assert len(refused(kind, **fields)) < 30


@pytest.mark.parametrize("count", [17, 10**9, 2**62])
def test_samples_are_bounded_before_anything_is_done_for_them(count):
    """CVE-2026-34756: samples were made before anybody counted them. CVE-2024-8939: the same with best_of."""
    assert validation_message(refused(CompletionBody, prompt="a", n=count))[1] == "n"
    assert (
        validation_message(refused(ChatBody, messages=[{"role": "user", "content": "a"}], n=count))[
            1
        ]
        == "n"
    )
    assert validation_message(refused(CompletionBody, prompt="a", best_of=count))[1] == "best_of"
    refused(CompletionBody, prompt="a", n=1, best_of=2)


def test_lists_are_bounded():
    assert len(completion(prompt=["a"] * 32).prompts) == 32
    refused(CompletionBody, prompt=["a"] * 33)
    refused(CompletionBody, prompt=[[5]] * 33)
    assert (
        len(
            completion(logit_bias={str(each): 1 for each in range(MOST_BIASES)})
            .params(5, None, 0)
            .logit_bias
        )
        == MOST_BIASES
    )
    refused(
        CompletionBody, prompt="a", logit_bias={str(each): 1 for each in range(MOST_BIASES + 1)}
    )
    assert completion(stop=["a" * 64] * 4).stops == ["a" * 64] * 4
    for stop in (["a"] * 5, "a" * 65, ["a" * 65], "", [""]):
        errors = refused(CompletionBody, prompt="a", stop=stop)
        assert validation_message(errors) == (
            "'stop': send a text, or a list of at most 4, each of 1 to 64 characters.",
            "stop",
        )


# ---- meaning --------------------------------------------------------------------------------------------------------


def test_prompts_are_told_apart():
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=[5, 6]).prompts == [[5, 6]]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[[5], [6, 7]]).prompts == [[5], [6, 7]]


def test_what_is_not_said_is_as_openai_has_it():
    params = CompletionBody(prompt="a").params(7, 3, 0)
    assert (params.temperature, params.top_p, params.seed, params.max_tokens, params.logprobs) == (
        1,
        1,
        None,
        7,
        3,
    )
    assert CompletionBody(prompt="a", temperature=0).params(7, None, 0).greedy


def test_each_sample_has_a_seed_of_its_own():
    assert [completion(seed=5).params(7, None, sample).seed for sample in range(3)] == [5, 6, 7]
    assert completion(seed=2**63 - 1).params(7, None, 1).seed == 0
    for seed in (None, -1):  # another one each time: so it must stay
        assert [completion(seed=seed).params(7, None, sample).seed for sample in range(3)] == [
            seed
        ] * 3


@settings(deadline=None, derandomize=True)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 15))
def test_every_seed_makes_valid_options_for_every_sample(seed, sample):
    assert completion(seed=seed).params(7, None, sample).generator()


def test_all_options_reach_the_sampler():
    fields = {
        "temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.2, "seed": 4, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 2.0, "ignore_eos": True, "min_tokens": 2,
    }  # fmt: skip
    params = completion(**fields, stop_token_ids=[1, 2], logit_bias={"5": 1.5, "6": -2}).params(
        7, 1, 0
    )
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.stop_token_ids == (1, 2) and params.logit_bias == {5: 1.5, 6: -2}
    with pytest.raises(UserError, match="min_tokens"):
        completion(min_tokens=8).params(7, None, 0)


# ---- errors ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(
    st.sampled_from([*TYPES, 422, 499, 599]),
    st.text(st.characters(), max_size=2000),
    st.none() | st.just("logit_bias"),
)
def test_an_error_is_small_whatever_it_says(status, message, param):
    """A body of 4 KB had made an error of 23 MB elsewhere. Halves of surrogate pairs have no UTF-8 at all."""
    body = error_body(status, message, param)
    for ascii in (True, False):
        assert len(json.dumps(body, ensure_ascii=ascii).encode()) <= LARGEST_ERROR
    assert (
        set(body["error"]) == {"message", "type", "param", "code"}
        and body["error"]["code"] == status
    )


@pytest.mark.parametrize("letter", ["a", "\0", "é", "😀", "\ud800"])
def test_the_longest_errors_are_small(letter):
    body = ApiError(503, letter * 10_000, "logit_bias").body()
    assert len(json.dumps(body, ensure_ascii=False).encode()) <= LARGEST_ERROR
    assert letter == "😀" or len(json.dumps(body).encode()) <= LARGEST_ERROR


def test_the_message_names_the_field_and_what_to_send():
    assert validation_message(refused(CompletionBody))[1] == "prompt"
    message, field = validation_message(refused(CompletionBody, prompt=5))
    assert field == "prompt" and "at most 32" in message
    for kind in (GenerateBody, TokenizeBody):  # there it can be nothing but text
        assert validation_message(refused(kind, prompt=["a"])) == (
            "'prompt': Input should be a valid string.",
            "prompt",
        )
    message, field = validation_message(
        refused(CompletionBody, prompt="a", stream_options={"include_usage": True})
    )
    assert field is None and "'stream_options' needs 'stream': true" in message
    assert validation_message([{"type": "json_invalid", "loc": ("body", 1), "msg": "..."}])[
        0
    ].startswith("The body is not JSON")
    assert validation_message([])[0]


# ---- chat templates -------------------------------------------------------------------------------------------------


def test_the_simple_template():
    messages = [
        Message(role="system", content="S"),
        Message(
            role="user", content=[{"type": "text", "text": "U"}, {"type": "text", "text": "V"}]
        ),  # type: ignore[list-item]
        Message(role="assistant", content=None),
        Message(role="tool", content="T"),
    ]
    assert SIMPLE.prompt(messages) == "System: S\nUser: U\nV\nAssistant: \nTool: T\nAssistant:"
    assert SIMPLE.stops == ("\nUser:",)


def test_what_is_said_is_no_template():
    """CVE-2025-61620, CVE-2026-5760: what a client wrote was run as a template."""
    for text in ("{content}", "{{ 7 * 7 }}", "{0.__class__}", "%s", "$HOME"):
        assert SIMPLE.prompt([Message(role="user", content=text)]) == f"User: {text}\nAssistant:"
        assert (
            SIMPLE.prompt([Message(role=text, content="x")])
            == f"{text.capitalize()}: x\nAssistant:"
        )


def test_a_template_from_a_file(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(
        json.dumps({"roles": {"user": "[{content}]"}, "start": ">", "stops": ["["]}),
        encoding="utf-8",
    )
    template = load_template(str(path))
    assert (
        template
        and template.prompt([Message(role="user", content="a"), Message(role="b", content="c")])
        == "[a]B: c\n>"
    )
    assert template.stops == ("[",)
    assert load_template("simple") is SIMPLE and load_template("none") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        "{}",
        '{"roles": {"user": "no content"}, "start": "", "stops": []}',
        '{"roles": {"user": 5}, "start": "", "stops": []}',
        '{"roles": [], "start": "", "stops": []}',
        '{"roles": {}, "start": 5, "stops": []}',
        '{"roles": {}, "start": "", "stops": [""]}',
        '{"roles": {}, "start": "", "stops": [5]}',
        '{"roles": {}, "start": "", "stops": "abc"}',
        '{"roles": {}, "start": "", "stops": 5}',
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path, text):
    path = tmp_path / "chat.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="choose simple, none, or a JSON file"):
        load_template(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    for name in (str(path), str(tmp_path), str(tmp_path / "absent"), "a\0b"):
        with pytest.raises(UserError, match="--chat-template"):
            load_template(name)
