"""A grammar as a mask, in every engine: each answer that ends is a text of its grammar."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch

from shared import models
from shared.catalog import STORIES
from shared.errors import UserError
from shared.tokenizer import ByteTokenizer, Tokenizer
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage05_paged.engine import make as make_paged
from stage09_kernels.engine import make as make_kernels
from stage11_speculative import grammar
from stage11_speculative.draft_model import first_layers
from stage11_speculative.engine import with_draft_model, with_drafts
from stage11_speculative.proposers import NGram
from stage11_speculative.suffix import Suffix

TOKENIZER = Tokenizer.from_folder(STORIES)
PROMPT = TOKENIZER.encode("Once upon a time")
FOX: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "colour": {"enum": ["red", "grey"]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "colour", "friends"],
    "additionalProperties": False,
}
ENGINES: dict[str, Any] = {
    "paged": make_paged,
    "kernels": make_kernels,
    "drafts": lambda model, contexts: with_drafts(make_paged(model, contexts), NGram(3, 1)),
    "suffix": lambda model, contexts: with_drafts(make_kernels(model, contexts), Suffix()),
    "draft model": lambda model, contexts: with_draft_model(
        make_paged(model, contexts), first_layers(model, 1)
    ),
    "drawn": lambda model, contexts: with_draft_model(
        make_paged(model, contexts), first_layers(model, 1), draws=True
    ),
}


TRY = grammar.Grammars._try


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No process for each grammar: these are harmless, but for one test's. One token matches."""
    monkeypatch.setattr("stage11_speculative.suffix.SHORTEST", 1)
    monkeypatch.setattr(grammar.Grammars, "_try", lambda *_: None)


def test_a_grammar_that_explodes_is_refused_by_a_process_that_ends(monkeypatch):
    monkeypatch.setattr(grammar.Grammars, "_try", TRY)
    for value, words in (
        ({"allOf": [{"pattern": f"a.*{place}"} for place in range(40)]}, "too much work"),
        ({"not": {}}, "Unimplemented keys"),
    ):
        with pytest.raises(UserError, match=words) as refusal:
            byte_grammars().compile(schema(value))
        assert "\n" not in str(refusal.value)
    matcher = byte_grammars().compile(schema({"const": 1}))
    assert not matcher.is_error() and byte_grammars().compile(schema({"const": 1})) is matcher


@cache
def byte_grammars() -> grammar.Grammars:
    return grammar.Grammars(ByteTokenizer(), 257, (256,))


@cache
def grammars() -> grammar.Grammars:
    return grammar.Grammars(TOKENIZER, TOKENIZER.vocab_size, (TOKENIZER.eos_id or 0,))


@cache
def the_model() -> Any:
    return models.load_model(models.load("stories"), dtype=torch.float32)


def masks_of(engine: Any) -> grammar.Masks:
    """The masks in front of the engine's sampler."""
    masks: Any = engine.sample_tokens
    return masks if isinstance(masks, grammar.Masks) else grammar.Masks(engine)


def ask(engine: Any, source: str | None, seed: int, **options: Any) -> Request:
    params = SamplingParams(max_tokens=90, temperature=1.0, seed=seed, **options)
    request = Request(PROMPT, params)
    if source is not None:
        grammar.Form(masks_of(engine), grammars(), source)(request)
    return engine.add(request)


def finish(engine: Any) -> None:
    for _ in engine.run():
        pass


def text_of(request: Request) -> str:
    ids = request.output.token_ids
    return TOKENIZER.decode(id for id in ids if id != TOKENIZER.eos_id)


def schema(value: dict[str, Any]) -> str:
    return grammar.start(grammar.of_schema(value))


def pattern(regex: str) -> str:
    return grammar.start(f"/{regex}/")


def constraint(source: str) -> grammar.Constraint:
    return grammar.Constraint(grammars(), grammars().compile(source))


def masks(source: str, text: str) -> list[torch.Tensor]:
    """The mask before each token of `text`, and behind it."""
    form, ids = constraint(source), TOKENIZER.encode(text)
    return [form.mask(ids[:count]) for count in range(len(ids) + 1)]


@cache
def plain_answers() -> list[list[int]]:
    engine = make_paged(the_model(), 4)
    requests = [ask(engine, schema(FOX), seed) for seed in range(2)]
    finish(engine)
    return [request.output.token_ids for request in requests]


@pytest.mark.parametrize("name", ENGINES)
def test_answers_are_valid_and_alike_and_their_neighbours_are_free(name):
    """Alike but for drawn drafts, for which a seed does not fix the tokens."""
    engine = ENGINES[name](the_model(), 4)
    free = ask(engine, None, 3)
    formed = [ask(engine, schema(FOX), seed) for seed in range(2)]
    digits = ask(engine, pattern("[0-9]{3}-[a-c]+x"), 9)
    finish(engine)
    ended = [request for request in formed if request.output.finish_reason == "stop"]
    assert ended
    if name != "drawn":
        assert [request.output.token_ids for request in formed] == plain_answers()
    for request in ended:
        jsonschema.validate(json.loads(text_of(request)), FOX)
    assert re.fullmatch("[0-9]{3}-[a-c]+x", text_of(digits))
    alone = ask(engine, None, 3)
    finish(engine)
    assert alone.output.token_ids == free.output.token_ids


def test_forced_tokens_are_drafts():
    """The keys of an object take fewer passes than they have tokens."""
    engine = ENGINES["drafts"](the_model(), 4)
    formed = ask(engine, schema(FOX), 1)
    finish(engine)
    assert len(engine.steps) < 0.7 * len(formed.output.token_ids)
    assert engine.scheduler.draft_counts.accepted > 20


def test_drafts_are_cut_at_the_first_illegal_token():
    form = constraint(pattern("[ab]*"))
    drafts = TOKENIZER.encode("ab, a")
    assert TOKENIZER.decode(form.drafts([], drafts, 9)) == "ab"
    inner: Any = Always(*drafts)
    engine = with_drafts(make_paged(the_model(), 4), inner)
    request, free = ask(engine, pattern("[ab]*"), 1), ask(engine, None, 1)
    cut, whole = engine.scheduler.proposer.propose([request, free], [9, 9])
    assert TOKENIZER.decode(cut) == "ab" and TOKENIZER.decode(whole) == "ab, a"
    inner.drawn = {request: None}  # `Rejection` must see what was drawn
    assert engine.scheduler.proposer.propose([request], [9]) == [whole]


class Always:
    """Proposes the same drafts, whatever has come."""

    def __init__(self, *drafts: int) -> None:
        self.drafts = list(drafts)

    def propose(self, requests: Any, most: Any) -> Any:
        return [self.drafts for _ in requests]

    def forget(self, request: Any) -> None:
        """Nothing is kept."""


def test_drafts_behind_the_end_of_a_form_change_nothing():
    """A parser that has followed drafts past its end cannot be taken back."""
    eos, (letter,) = TOKENIZER.eos_id or 0, TOKENIZER.encode("b")
    answers, stops = [], 0
    for drafts in ((), (letter, eos, eos, letter), (eos, letter)):
        engine = with_drafts(make_paged(the_model(), 4), Always(*drafts))
        options = {"logit_bias": {letter: 5.0}}
        requests = [ask(engine, pattern("[ab]c?"), seed, **options) for seed in range(6)]
        finish(engine)
        assert not any(request.output.error for request in requests)
        answers.append([request.output.token_ids for request in requests])
        stops += engine.scheduler.draft_counts.accepted
    assert answers[0] == answers[1] == answers[2] and stops > 3


def test_a_mask_leaves_what_the_grammar_allows():
    first, *_, after = masks(pattern("ab|cd"), "ab")
    allowed = {TOKENIZER.decode([id]) for id in first.nonzero()[:, 0].tolist()}
    assert allowed <= {"a", "c", "ab", "cd"}
    assert after.nonzero().tolist() == [[TOKENIZER.eos_id]]
    inside, *_ = masks(schema(FOX), '{"')[1:]  # a model that may write spaces without end does
    assert not any(TOKENIZER.decode([id]).isspace() for id in inside.nonzero()[:, 0].tolist())


def test_control_tokens_and_ids_without_a_token_are_never_allowed():
    class Chatty(ByteTokenizer):
        control = frozenset({"<|end|>"})

        def __init__(self) -> None:
            super().__init__()
            self.vocab_size = 300

        def decode_bytes(self, ids: Any) -> bytes:
            (id,) = ids
            return b"<|end|>" if id == 299 else super().decode_bytes([id])

    chatty = grammar.Grammars(Chatty(), 310, (256,))
    form = grammar.Constraint(chatty, chatty.compile(grammar.start("/(?s:.*)/")))
    allowed = set(form.mask([]).nonzero()[:, 0].tolist())
    assert allowed >= set(range(128)) and 256 in allowed
    assert not allowed & (set(range(257, 310)))


@pytest.mark.parametrize(
    "value, words",
    [
        ({"type": "string", "pattern": "^a$", "minLength": 5}, "nsatisfiable"),
        ({"enum": []}, "nsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
        ({"not": {}}, "not"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "unheard-of"}, "format"),
        ({"$ref": "http://host.example/schema"}, "retriev"),
        ({"allOf": [{"$id": "http://host.example/", "$ref": "schema"}]}, "no effect"),
        ({"type": "string", "pattern": "(?=a)b"}, "regex"),
        ({"enum": ["x" * 2**18]}, "shorten"),
        ({"items": {"prefixItems": [{"const": 1}], "additionalItems": False}}, "prefixItems"),
        ({"$recursiveRef": "#"}, "recursiveRef"),
        ({"properties": {"a": {}}, "minProperties": 1}, "write 'required'"),
        ({"minProperties": 2, "required": ["a"]}, "may repeat"),
        ({"propertyNames": {"maxLength": 1}}, "propertyNames"),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused_in_one_line(value, words):
    with pytest.raises(UserError, match=words) as refusal:
        constraint(schema(value))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


def test_a_name_cannot_be_spelled_so_that_it_escapes_its_schema():
    """Not in an object that allows other names, nor in one whose names match a pattern."""
    whole = {"größe": {"type": "integer"}}
    cases: list[tuple[dict[str, Any], str, bool]] = [
        ({"type": "object", "properties": whole}, '{"größe": 1, "gr\\u00f6\\u00dfe": "x"}', False),
        ({"type": "object", "properties": whole}, '{"größe": 1, "grösse": "x"}', True),
        ({"type": "object", "patternProperties": {"^g": {"const": 1}}}, '{"\\u0067": 2}', False),
        ({"type": "object", "patternProperties": {"^g": {"const": 1}}}, '{"g": 1, "h": 2}', True),
        ({"type": "string", "pattern": "^[^a]*$"}, '"\\u0061"', False),
        ({"type": "string"}, '"a\\n\\t\\\\\\"/ ü"', True),
    ]
    for value, text, valid in cases:
        matcher, data = byte_grammars().compile(schema(value)).deep_copy(), list(text.encode())
        assert (matcher.try_consume_tokens(data) == len(data)) == valid, text


@pytest.mark.parametrize("name", ENGINES)
def test_a_parser_that_fails_ends_its_request_and_no_other(name):
    engine = ENGINES[name](the_model(), 4)
    broken, free = ask(engine, schema(FOX), 1), ask(engine, None, 3)
    engine.step()
    parser = masks_of(engine).constraints[broken].matcher
    parser.consume_token(TOKENIZER.eos_id or 0)  # which it does not allow
    finish(engine)
    assert broken.output.error
    assert broken.output.finish_reason == "error" and free.output.finish_reason == "length"


def test_a_model_without_an_end_of_text_has_no_forms():
    with pytest.raises(UserError, match="ends texts"):
        grammar.Grammars(ByteTokenizer(), 256, ())
