"""A grammar as a mask, in every engine: each answer that ends is a text of its grammar."""

from __future__ import annotations

import json
import re
from functools import cache
from threading import Event, Thread
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch

from shared import models
from shared.errors import UserError
from shared.models import STORIES
from shared.tokenizer import ByteTokenizer, Tokenizer
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage05_paged.engine import make as make_paged
from stage09_kernels.engine import make as make_kernels
from stage11_speculative import grammar
from stage11_speculative.engine import with_drafts
from stage11_speculative.proposers import NGram

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
NESTED: dict[str, Any] = {"type": "object", "properties": {"c": {"$ref": "#"}}}
PAIR: dict[str, Any] = {"type": "array", "minItems": 1, "prefixItems": [{"$ref": "#/$defs/b"}]}
EITHER: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
ENGINES: dict[str, Any] = {
    "paged": make_paged,
    "kernels": lambda model, contexts: make_kernels(model, contexts, observers=[grammar.Ahead()]),
    "drafts": lambda model, contexts: with_drafts(make_paged(model, contexts), NGram(3, 1)),
}


@cache
def grammars() -> grammar.Grammars:
    return grammar.Grammars(TOKENIZER, TOKENIZER.vocab_size, (TOKENIZER.eos_id or 0,))


@cache
def the_model() -> Any:
    return models.load_model(models.load("stories"), dtype=torch.float32)


def ask(engine: Any, source: str | None, seed: int, **options: Any) -> Request:
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=seed, **options)
    request = Request(PROMPT, params)
    if source is not None:
        grammar.Form(grammars(), source)(request)
    return engine.add(request)


def finish(engine: Any) -> None:
    for _ in engine.run():
        pass


def text_of(request: Request) -> str:
    ids = request.output.token_ids
    return TOKENIZER.decode(id for id in ids if id != TOKENIZER.eos_id)


def schema(value: dict[str, Any]) -> str:
    return grammar.start(grammar.of_schema(value))


def masks(source: str, text: str) -> list[torch.Tensor]:
    """The mask before each token of `text`, and behind it."""
    request = Request(PROMPT, SamplingParams(max_tokens=1000))
    grammar.Form(grammars(), source)(request)
    seen = []
    for id in [*TOKENIZER.encode(text), -1]:
        assert request.row.mask is not None
        seen.append(request.row.mask)
        request.output.token_ids.append(id)
    return seen


@pytest.mark.parametrize("name", ENGINES)
def test_answers_are_valid_and_their_neighbours_are_free(name):
    engine = ENGINES[name](the_model(), 4)
    free = ask(engine, None, 3)
    formed = [ask(engine, schema(FOX), seed) for seed in range(4)]
    digits = ask(engine, grammar.regex("[0-9]{3}-[a-c]+x"), 9)
    finish(engine)
    ended = [request for request in formed if request.output.finish_reason == "stop"]
    assert len(ended) >= 3
    for request in ended:
        jsonschema.validate(json.loads(text_of(request)), FOX)
    assert re.fullmatch("[0-9]{3}-[a-c]+x", text_of(digits))
    alone = ask(engine, None, 3)
    finish(engine)
    assert alone.output.token_ids == free.output.token_ids


def test_every_engine_gives_the_same_tokens():
    """Seeded, with drafts that are cut where the sampler refuses them, and logprobs."""
    answers = []
    for make in ENGINES.values():
        engine = make(the_model(), 4)
        requests = [ask(engine, schema(FOX), seed, logprobs=1) for seed in (1, 2)]
        finish(engine)
        answers.append([request.output.token_ids for request in requests])
    assert answers[0] == answers[1] == answers[2]


def test_forced_tokens_are_drafts():
    """The keys of an object take fewer passes than they have tokens, and all answers stay."""
    plain, engine = make_paged(the_model(), 4), ENGINES["drafts"](the_model(), 4)
    expected, formed = ask(plain, schema(FOX), 1), ask(engine, schema(FOX), 1)
    finish(plain)
    finish(engine)
    assert formed.output.token_ids == expected.output.token_ids
    counts = engine.scheduler.draft_counts
    assert len(engine.steps) < 0.7 * len(plain.steps)
    assert counts.accepted > 20


def test_drafts_are_cut_at_the_first_illegal_token():
    class Fixed:
        distributions: Any = {}

        def propose(self, requests: Any, most: Any) -> Any:
            return [TOKENIZER.encode("ab, a") for _ in requests]

    request, free = (Request(PROMPT, SamplingParams()) for _ in range(2))
    grammar.Form(grammars(), grammar.regex("[ab]*"))(request)
    proposer = grammar.Forced(Fixed())  # type: ignore[arg-type]
    cut, whole = proposer.propose([request, free], [9, 9])
    assert TOKENIZER.decode(cut) == "ab" and TOKENIZER.decode(whole) == "ab, a"
    Fixed.distributions = {request: None}  # drawn drafts: `Rejection` must see what was drawn
    assert proposer.propose([request], [9]) == [whole]


class Always:
    """Proposes the same drafts, whatever has come."""

    def __init__(self, *drafts: int) -> None:
        self.drafts = list(drafts)

    def propose(self, requests: Any, most: Any) -> Any:
        return [self.drafts for _ in requests]

    def forget(self, request: Any) -> None:
        """Nothing is kept."""


def test_an_illegal_draft_is_never_verified():
    """It would be refused in every pass, and proposed again in the next."""
    engine = with_drafts(make_paged(the_model(), 4), Always(*TOKENIZER.encode("x")))
    request = ask(engine, grammar.regex("([ab]|ab){9,}"), 1)
    finish(engine)
    assert request.output.error is None and len(engine.steps) == len(request.output.token_ids)
    assert not engine.scheduler.draft_counts.proposed


def test_drafts_behind_the_end_of_a_form_change_nothing():
    """A parser that has followed drafts past its end cannot be taken back."""
    eos, (letter,) = TOKENIZER.eos_id or 0, TOKENIZER.encode("b")
    answers, stops = [], 0
    for drafts in ((), (letter, eos, eos, letter), (eos, letter)):
        engine = with_drafts(make_paged(the_model(), 4), Always(*drafts))
        options = {"logit_bias": {letter: 5.0}}
        requests = [ask(engine, grammar.regex("[ab]c?"), seed, **options) for seed in range(6)]
        finish(engine)
        assert not any(request.output.error for request in requests)
        answers.append([request.output.token_ids for request in requests])
        stops += engine.scheduler.draft_counts.accepted
    assert answers[0] == answers[1] == answers[2] and stops > 3


def test_a_draft_waits_for_a_mask_that_is_computed():
    """The masks of the last pass may still be computed when the next one is planned: a token that
    the parser reads twice ends its request."""
    request = Request(PROMPT, SamplingParams())
    grammar.Form(grammars(), grammar.regex("[ab]{9}"))(request)
    reads, entered, leave = list[int](), Event(), Event()
    row: Any = request.row

    class Slow:
        """The parser, whose reading takes until it may leave."""

        matcher = row.matcher

        def __getattr__(self, name: str) -> Any:
            return getattr(self.matcher, name)

        def consume_token(self, token_id: int) -> None:
            reads.append(token_id)
            entered.set()
            assert leave.wait(60)
            self.matcher.consume_token(token_id)

    row.matcher = Slow()
    request.output.token_ids += TOKENIZER.encode("a")
    masks = Thread(target=lambda: row.mask)
    drafts = Thread(target=lambda: grammar.Forced(Always()).propose([request], [4]))
    masks.start()
    assert entered.wait(60)
    drafts.start()
    drafts.join(0.2)
    leave.set()
    masks.join(60)
    drafts.join(60)
    assert reads == request.output.token_ids and not row.error


def test_a_mask_leaves_what_the_grammar_allows():
    first, *_, after = masks(grammar.regex("ab|cd"), "ab")
    assert {TOKENIZER.decode([id]) for id in first.nonzero()[:, 0].tolist()} <= {
        "a",
        "c",
        "ab",
        "cd",
    }
    assert after.nonzero().tolist() == [[TOKENIZER.eos_id]]


def test_white_space_is_bounded_and_digits_are_capped():
    """A model that may write them without end does, up to max_tokens."""
    inside, *_ = masks(schema(FOX), '{"')[1:]
    assert not any(TOKENIZER.decode([id]).isspace() for id in inside.nonzero()[:, 0].tolist())
    seen = masks(schema({"type": "integer"}), "1" * (grammar.MOST_DIGITS + 1))
    allowed = [bool((mask & grammars().digits).any()) for mask in seen]
    assert allowed[0] and not allowed[-1] and allowed[-3]
    forced = masks(grammar.regex(f"[0-9]{{{grammar.MOST_DIGITS + 9}}}"), "1" * 30)
    assert forced[-1].any()  # no other end: the cap gives way


def test_control_tokens_and_ids_without_a_token_are_never_allowed():
    class Chatty(ByteTokenizer):
        control = frozenset({"<|end|>"})
        vocab_size = 300

        def decode_bytes(self, ids: Any) -> bytes:
            (id,) = ids
            return b"<|end|>" if id == 299 else super().decode_bytes([id])

    form = grammar.Form(grammar.Grammars(Chatty(), 310, (256,)), grammar.start("/(?s:.*)/"))
    request = Request([1], SamplingParams())
    form(request)
    assert request.row.mask is not None
    allowed = set(request.row.mask.nonzero()[:, 0].tolist())
    assert allowed >= set(range(128)) and 256 in allowed
    assert not allowed & (set(range(257, 310)))


@pytest.mark.parametrize(
    "value, words",
    [
        ({"type": "string", "pattern": "^a$", "minLength": 5}, "nsatisfiable"),
        ({"enum": []}, "nsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
        ({"$ref": "#"}, "enforced"),
        ({**NESTED, "required": ["c"]}, "'#' .* needs itself"),
        ({"$defs": {"a": PAIR, "b": EITHER}, **EITHER}, "needs itself"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "needs itself"),
        ({"not": {}}, "not"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "unheard-of"}, "format"),
        ({"$ref": "http://host.example/schema"}, "retriev"),
        ({"allOf": [{"$id": "http://host.example/", "$ref": "schema"}]}, "before 2019-09"),
        ({"type": "string", "pattern": "(?=a)b"}, "regex"),
        ({"enum": ["x" * 2**18]}, "shorten"),
        ({"items": {"prefixItems": [{"const": 1}], "additionalItems": False}}, "prefixItems"),
        ({"$recursiveRef": "#"}, "recursiveRef"),
        ({"properties": {"a": {}}, "minProperties": 1}, "maxProperties"),
        ({"propertyNames": {"maxLength": 1}}, "propertyNames"),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused_in_one_line(value, words):
    with pytest.raises(UserError, match=words) as refusal:
        grammar.Form(grammars(), schema(value))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "value",
    [
        NESTED,
        {"anyOf": [{**NESTED, "required": ["c"]}, {"type": "null"}]},
        {"$defs": {"a": PAIR, "b": {"anyOf": [*EITHER["anyOf"], {"const": 1}]}}, **EITHER},
        {"type": "array", "items": {"$ref": "#"}},
    ],
    ids=str,
)
def test_a_schema_that_refers_to_itself_and_ends_is_kept(value):
    grammar.Form(grammars(), schema(value))


def test_a_parser_that_fails_ends_its_request_and_no_other():
    engine = make_paged(the_model(), 4, observers=[grammar.Ahead()])
    broken, free = ask(engine, schema(FOX), 1), ask(engine, None, 3)
    engine.step()
    assert isinstance(broken.row, grammar.FormRow)
    broken.row.matcher.consume_token(TOKENIZER.eos_id or 0)  # which it does not allow
    finish(engine)
    assert broken.output.error
    assert broken.output.finish_reason == "error" and free.output.finish_reason == "length"


def test_compiled_grammars_are_kept_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(grammar, "KEPT", 2)
    fresh = grammar.Grammars(TOKENIZER, TOKENIZER.vocab_size, (TOKENIZER.eos_id or 0,))
    first = fresh.compile(grammar.regex("a"))
    assert fresh.compile(grammar.regex("a")) is first
    for pattern in "bac":
        fresh.compile(grammar.regex(pattern))
    assert fresh.compile(grammar.regex("a")) is first
    assert len(fresh._kept) == 2


def test_a_model_without_an_end_of_text_has_no_forms():
    with pytest.raises(UserError, match="ends a text"):
        grammar.Grammars(ByteTokenizer(), 256, ())
