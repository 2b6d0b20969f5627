"""A grammar as a mask: before each token of an answer, the ids that may come next.

llguidance keeps the state of a parser, and says for every token of the vocabulary whether the text
so far, with that token behind it, can still become a text of the grammar. The other ids get the
score minus infinity before the sampler sees them: `Masks` comes before an engine's
`sample_tokens`, so no sampler, no engine and no proposer of drafts knows of grammars. A mask is
computed from the tokens that the output has when it is sampled, so it is right behind drafts, too.

What cannot be enforced is refused. A `format` is enforced as a pattern of letters: a date may be
29 February of any year, and any minute may have a leap second. A `pattern` is one of Rust's regex,
whose white space is not quite ECMA's. `contentEncoding` and `contentMediaType` are notes. A text
that never ends, as a schema may demand, ends at max_tokens.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import llguidance
import numpy as np
import torch
from torch import Tensor

from shared.errors import UserError
from shared.tokenizer import AnyTokenizer
from stage04_continuous.engine import Sampled
from stage04_continuous.request import Request
from stage06_serving.async_engine import Refused

from .drafts import Drafts, DraftScheduler, Proposer

# No other white space than this: a model that may write spaces without end does. No \\u, by which a
# name could be written as one that the schema does not know.
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
OPTIONS |= {"json_allowed_escapes": 'nrbtf\\"', "lenient": False, "coerce_one_of": False}
UNWRITABLE = re.compile(r"[^\x20-\U0010ffff\n\r\t\b\f]")  # but by an escape that is not allowed
MOST_SOURCE = 2**18  # characters of a grammar
TRIAL = Path(__file__).with_name("trial.py")
PATIENCE = 30.0  # seconds until it must have ended, where the machine is busy
KEPT = 64  # compiled grammars
# Fuel for one mask buys some 10 ms, for one grammar some 100 ms; a state takes 2 kB.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
CANNOT = "The form cannot be enforced: {}"
BROKEN = "The grammar needs too much work for a token ({}): send a simpler one."


def of_schema(schema: dict[str, Any]) -> str:
    """The grammar of JSON texts that are valid for `schema`, as a rule of llguidance's Lark. Raises
    UserError for a schema of which llguidance would ignore a part."""
    text = json.dumps({**schema, "x-guidance": OPTIONS})
    for part in parts(schema):
        if isinstance(part, str) and UNWRITABLE.search(part):
            raise UserError(CANNOT.format("it has control characters: remove them."))
        if not isinstance(part, dict):
            continue
        least, required = part.get("minProperties"), part.get("required")
        reference = part.get("$ref") if "$id" in part and part is not schema else "#"
        if "additionalItems" in part and isinstance(part.get("prefixItems"), list):
            raise UserError(CANNOT.format("'additionalItems' beside 'prefixItems': write 'items'."))
        if isinstance(reference, str) and reference[:1] != "#":
            raise UserError(CANNOT.format("an '$id' beside a '$ref' has no effect: remove it."))
        if isinstance(least, int) and least > len(required if isinstance(required, list) else ()):
            raise UserError(CANNOT.format("names may repeat in 'minProperties': write 'required'."))
    return f"%json {text}"


def parts(schema: Any) -> Iterator[Any]:
    """It, and all keys and values in it."""
    yield schema
    inner = [*schema, *schema.values()] if isinstance(schema, dict) else schema
    for part in inner if isinstance(inner, list) else ():
        yield from parts(part)


def start(rule: str, *others: str) -> str:
    """A whole grammar in Lark. others: rules, each in a line, that `rule` names."""
    return "\n".join(["%llguidance {}", f"start: {rule}", *others, ""])


def first_line(text: str) -> str:
    """Of an error of llguidance, what is wrong; the other lines show the parser's state."""
    return text.strip().partition("\n")[0].rstrip(" :.")[:200] + "."


class Encoder:
    """A tokenizer as llguidance wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: AnyTokenizer, size: int, eos_ids: Sequence[int]) -> None:
        self.tokenizer, self.eos_token_id = tokenizer, eos_ids[0]
        self.tokens = [tokenizer.decode_bytes([token_id]) for token_id in range(size)]
        unknown = tokenizer.decode_bytes([size])  # how an id without a token is shown
        for token_id, data in enumerate(self.tokens):
            if data == unknown.replace(str(size).encode(), str(token_id).encode()):
                self.tokens[token_id] = b""
        control = {word.encode() for word in getattr(tokenizer, "control", ())}
        special = {id for id, data in enumerate(self.tokens) if data in control}
        self.special_token_ids = sorted(special | set(eos_ids))
        self._bytes = {data[0]: id for id, data in enumerate(self.tokens) if len(data) == 1}

    def __call__(self, text: str) -> list[int]:
        """The ids of a text. Their bytes are exactly the text's: where a tokenizer puts a space
        before it, or composes its letters, byte by byte."""
        ids, data = self.tokenizer.encode(text), text.encode()
        if b"".join(self.tokens[token_id] for token_id in ids) == data:
            return ids
        return [self._bytes[byte] for byte in data if byte in self._bytes]


class Grammars:
    """Compiles grammars for a model of `size` ids, and keeps the latest. Raises UserError if the
    model's texts have no end."""

    def __init__(self, tokenizer: AnyTokenizer, size: int, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise UserError("No answer in a given form would end: choose a model that ends texts.")
        encoder = Encoder(tokenizer, size, eos_ids)
        self.size, self.compile = size, lru_cache(KEPT)(self._compile)
        wrapper = llguidance.TokenizerWrapper(encoder)
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=list(eos_ids))

    def _compile(self, source: str) -> llguidance.LLMatcher:
        """A parser at its beginning, to be copied for each answer. Raises UserError for a grammar
        that cannot be enforced, that takes too much work, or that no text satisfies."""
        if len(source) > MOST_SOURCE:
            raise UserError(f"The form has over {MOST_SOURCE} characters: shorten schema or tools.")
        self._try(source)
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise UserError(CANNOT.format(first_line(matcher.get_error())))
        return matcher

    def _try(self, source: str) -> None:
        """Compile it in a process of its own: some grammars take hours or gigabytes, and neither
        llguidance's limits nor a thread can stop them."""
        words, task = [sys.executable, "-P", str(TRIAL)], json.dumps([source, LIMITS])
        pipes: dict[str, Any] = {"input": task, "capture_output": True, "text": True}
        try:
            error = json.loads(subprocess.run(words, timeout=PATIENCE, **pipes).stdout)
        except (subprocess.TimeoutExpired, ValueError):  # or it had no memory left
            raise UserError("The form takes too much work: send a simpler one.") from None
        if error:
            raise UserError(CANNOT.format(first_line(error)))


class Constraint:
    """What one answer may be: a parser of its own, which follows the answer."""

    def __init__(self, grammars: Grammars, matcher: llguidance.LLMatcher) -> None:
        self.grammars, self.matcher = grammars, matcher.deep_copy()
        self._read = 0  # tokens of the output that the matcher has

    def follow(self, output: Sequence[int]) -> None:
        self.matcher.consume_tokens(list(output[self._read :]))
        self._read = len(output)

    def mask(self, output: Sequence[int]) -> Tensor:
        """(V,) of bool: the ids that may come behind `output`; none once the parser has failed."""
        self.follow(output)
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        size = self.grammars.size
        mask = torch.from_numpy(np.unpackbits(bits, count=size, bitorder="little").view(np.bool_))
        return torch.zeros_like(mask) if self.matcher.is_error() else mask

    def drafts(self, output: Sequence[int], proposed: Drafts, most: int) -> Drafts:
        """What the grammar forces behind `output`; else what is proposed, up to the first token
        that it forbids. A forced text can be cut into tokens in several ways, so these are drafts,
        too: only where the mask leaves one token is it certain that the sampler agrees."""
        self.follow(output)
        if forced := self.matcher.compute_ff_tokens():
            return list(forced[:most])
        return proposed[: self.matcher.validate_tokens(proposed)]


class Masks:
    """Comes before the sampler of `engine`, and behind its proposer of drafts, if any. Called
    as `sample_tokens` is."""

    def __init__(self, engine: Any) -> None:
        self.constraints: WeakKeyDictionary[Request, Constraint] = WeakKeyDictionary()
        self.inner, engine.sample_tokens = engine.sample_tokens, self
        if isinstance(engine.scheduler, DraftScheduler):
            engine.scheduler.proposer = Forced(engine.scheduler.proposer, self)

    @torch.inference_mode()
    def __call__(
        self, requests: Sequence[Request], logits: Tensor, eos_ids: Sequence[int]
    ) -> list[Sampled]:
        for place, request in enumerate(requests if self.constraints else ()):
            if constraint := self.constraints.get(request):
                mask = constraint.mask(request.output.token_ids)
                logits[place].masked_fill_(~mask.to(logits.device), -math.inf)
        sampled = self.inner(requests, logits, eos_ids)
        for request in filter(self.constraints.get, requests if self.constraints else ()):
            matcher = self.constraints[request].matcher
            if matcher.is_error():  # no token was left, so the sampler has ended the request
                why = first_line(matcher.get_error()).rstrip(".")
                request.output.error = Refused(BROKEN.format(why))
        return sampled


class Forced:
    """The drafts of `inner`, as far as constraints allow them, and what these force. Drafts that
    were drawn stay as they are: the rule of rejection.py must see all that was drawn."""

    def __init__(self, inner: Proposer, masks: Masks) -> None:
        self.inner, self.masks = inner, masks

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Drafts]:
        drafts = self.inner.propose(requests, most)
        drawn = getattr(self.inner, "drawn", {})
        for place, request in enumerate(requests):
            constraint = self.masks.constraints.get(request)
            if constraint and request not in drawn:
                output = request.output.token_ids
                drafts[place] = constraint.drafts(output, drafts[place], most[place])
        return drafts

    def forget(self, request: Request) -> None:
        self.inner.forget(request)


class Form:
    """Gives requests the form of one grammar. Raises UserError, as `Grammars.compile` does."""

    def __init__(self, masks: Masks, grammars: Grammars, source: str) -> None:
        self.masks, self.grammars, self.matcher = masks, grammars, grammars.compile(source)

    def __call__(self, request: Request) -> None:
        self.masks.constraints[request] = Constraint(self.grammars, self.matcher)
