"""A grammar as a mask: before each token of an answer, the ids that may come next.

llguidance keeps the state of a parser, and says for every token of the vocabulary whether the text
so far, with that token behind it, can still become a text of the grammar. Those are the True places
of `Row.mask`, so no sampler and no engine knows of grammars.

A `FormRow` computes its mask when the sampler asks, from the tokens that its output has by then.
So it is right for each position of drafts too: the waves of `engine.py` ask for a position when
the drafts before it are in the output.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import llguidance
import numpy as np
import torch
from torch import Tensor

from shared.errors import UserError
from shared.paths import ROOT
from shared.spelling import number_of
from shared.tokenizer import AnyTokenizer
from stage01_forward.generation import Row
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request
from stage06_serving.status import Refused

from . import endless
from .drafts import Drafts, Proposer

# No other white space than this: a model that may write spaces without end does.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
STRICT = {"lenient": False, "coerce_one_of": False}  # refuse what cannot be enforced
MOST_DIGITS = 24  # in a row, where the grammar allows another end: numbers run on, too
MOST_SOURCE = 2**18  # characters of a grammar
MARK = "\x02"  # a character that no tokenizer merges with another
TRIAL = ROOT / "stage11_speculative" / "trial.py"  # a student's copy has none beside it
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
# llguidance takes additionalItems for a sign that `items` is the list, as it was before 2020-12.
PREFIX = "'additionalItems' does not go with 'prefixItems': write 'items'."
SIBLING = "an '$id' beside a '$ref' has no effect before 2019-09: remove it."
BROKEN = "The grammar needs too much work for a token ({}): send a simpler one."

log = logging.getLogger(__name__)


def of_schema(schema: dict[str, Any], whitespace: str | None = None) -> str:
    """The grammar of JSON texts that are valid for `schema`, as a rule of llguidance's Lark.
    whitespace: a regular expression for white space between tokens of JSON. Raises UserError for a
    schema whose texts have no end, or of which llguidance would ignore a part."""
    options = SPACING | STRICT
    if whitespace is not None:
        options = STRICT | {"whitespace_pattern": whitespace}
    text = json.dumps({**schema, "x-guidance": options})
    if len(text) <= MOST_SOURCE:  # a longer one is refused anyway
        endless.check(schema)
        for part in endless.objects(schema):
            if "additionalItems" in part and isinstance(part.get("prefixItems"), list):
                raise UserError(f"The form cannot be enforced: {PREFIX}")
            reference = part.get("$ref") if "$id" in part and part is not schema else "#"
            if isinstance(reference, str) and reference[:1] != "#":
                raise UserError(f"The form cannot be enforced: {SIBLING}")
    return f"%json {text}"


def literal(text: str) -> str:
    """A rule that matches `text` alone."""
    return json.dumps(text, ensure_ascii=False)


def start(rule: str, *others: str) -> str:
    """A whole grammar in Lark. others: rules, each in a line, that `rule` names."""
    return "\n".join(["%llguidance {}", f"start: {rule}", *others, ""])


def regex(pattern: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_regex(pattern))


def users(grammar: str) -> str:
    """A grammar that a user wrote, in Lark or GBNF. Raises UserError."""
    try:
        return str(llguidance.grammar_from("grammar", grammar))
    except ValueError as error:
        raise UserError(f"The grammar cannot be read: {first_line(str(error))}") from None


def first_line(text: str) -> str:
    """Of an error of llguidance, what is wrong; the other lines show the parser's state."""
    line = text.strip().partition("\n")[0].rstrip(" :.")
    return f"{line[:200]}."


class Encoder:
    """A tokenizer as llguidance wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: AnyTokenizer, size: int, eos_ids: Sequence[int]) -> None:
        self.tokenizer, self.eos_token_id = tokenizer, eos_ids[0]
        self.tokens = [tokenizer.decode_bytes([token_id]) for token_id in range(size)]
        for token_id, data in enumerate(self.tokens):
            if data == number_of(token_id):
                self.tokens[token_id] = b""  # there is no such token
        self._bytes = {data[0]: id for id, data in enumerate(self.tokens) if len(data) == 1}
        control = {word.encode() for word in getattr(tokenizer, "control", ())}
        special = {id for id, data in enumerate(self.tokens) if data in control}
        self.special_token_ids = sorted(special | set(eos_ids))

    def __call__(self, text: str) -> list[int]:
        """The ids of a text. Their bytes are exactly the text's, though a tokenizer may put a space
        before it, or compose its letters."""
        if not hasattr(self.tokenizer, "encode_chat"):  # `encode` adds tokens around a text
            return self.tokenizer.encode(text)
        encode, decode = self.tokenizer.encode_chat, self.tokenizer.decode_bytes
        ids: list[int] = encode([(text, False)])
        data = text.encode()
        if decode(ids) == data:
            return ids
        before, ids = encode([(MARK, False)]), encode([(MARK + text, False)])
        same: list[int] = []  # no space is put behind the mark
        for token_id in ids[len(before) :]:
            if not data.startswith(token := decode([token_id])):
                break
            data = data[len(token) :]
            same.append(token_id)
        return same + [self._bytes[byte] for byte in data if byte in self._bytes]


class Trial:
    """A process that compiles each grammar first; it is started again after it had to be ended."""

    def __init__(self) -> None:
        self._end: Callable[[], object] = lambda: None
        self._process: subprocess.Popen[str] | None = None

    def check(self, source: str) -> None:
        """Raises UserError for a grammar with an error, or that takes too much time or memory."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        answer = self._ask(source)
        if answer is None:
            self._end()
            raise UserError("The form takes too much work to compile: send a simpler one.")
        if answer:
            raise UserError(f"The form cannot be enforced: {first_line(answer)}")

    def _start(self) -> None:
        self._end()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(TRIAL)],
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._end = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(LIMITS) + "\n")

    def _ask(self, source: str) -> str | None:
        """What is wrong with the grammar; None if the process has ended."""
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(OSError):
            stdin.write(json.dumps(source) + "\n")
            stdin.flush()
            if line := stdout.readline():
                return str(json.loads(line))
        return None


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(OSError), process:
        process.kill()


class Grammars:
    """Compiles grammars for one model, and keeps the latest. Any thread may use it.

    size: the model's count of ids. Raises UserError for a model whose texts have no end.
    """

    def __init__(self, tokenizer: AnyTokenizer, size: int, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise UserError(
                "This model has no token that ends a text, so no answer in a given form would end: "
                "choose another model."
            )
        self.size = size
        encoder = Encoder(tokenizer, size, eos_ids)
        self.tokens = encoder.tokens
        digits = [data[:1].isdigit() for data in encoder.tokens]
        self.digits = torch.tensor(digits)  # (V,): the ids that begin with one
        wrapper = llguidance.TokenizerWrapper(encoder)
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=list(eos_ids))
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._trial, self._lock = Trial(), threading.Lock()
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile(self, source: str) -> llguidance.LLMatcher:
        """A parser at its beginning, to be copied for each answer. Raises UserError for a grammar
        that cannot be enforced, that takes too much work, or that no text satisfies."""
        if len(source) > MOST_SOURCE:
            raise UserError(
                f"The grammar has {len(source)} characters, and {MOST_SOURCE} are allowed: shorten "
                "the schema or the list of tools."
            )
        with self._lock:  # one at a time: a grammar may take a processor for a moment
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
            self._trial.check(source)
            matcher = llguidance.LLMatcher(
                self._tokenizer, source, log_level=0, limits=self._limits
            )
            if matcher.is_error():
                raise UserError(f"The form cannot be enforced: {first_line(matcher.get_error())}")
            self._kept[source] = matcher
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return matcher


class FormRow(Row):
    """A sampler's row whose mask follows a grammar; any thread may ask for it. `matcher`: a copy of
    its own."""

    def __init__(self, row: Row, grammars: Grammars, matcher: llguidance.LLMatcher) -> None:
        self.grammars, self.matcher = grammars, matcher
        self.error = ""  # why there is no mask, which ends the request
        self.lock = threading.Lock()  # of the matcher: `Ahead` may be late with an earlier mask
        self._read = 0  # tokens of the output that the matcher has
        self._digits = 0  # at the end of them
        self._masked = -1  # tokens of the output that `_mask` follows
        self._mask: Tensor | None = None
        super().__init__(row.params, row.prompt, row.output)

    @property
    def mask(self) -> Tensor:
        """(V,) of bool, for the next token of the output. Once the parser has failed no id may come
        next, which ends the request and no other."""
        with self.lock:
            if self._masked != len(self.output) or self._mask is None:
                self._mask, self._masked = self._next(), len(self.output)
            return self._mask

    @mask.setter
    def mask(self, value: Tensor | None) -> None:
        """The grammar decides."""

    def _next(self) -> Tensor:
        self.read()
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        size = self.grammars.size
        mask = torch.from_numpy(np.unpackbits(bits, count=size, bitorder="little").view(np.bool_))
        if self.matcher.is_error():
            self.error = BROKEN.format(first_line(self.matcher.get_error()).rstrip("."))
            log.warning("%s", self.error)
            return torch.zeros(size, dtype=torch.bool)
        if self._digits >= MOST_DIGITS:
            shorter = mask & ~self.grammars.digits
            mask = shorter if shorter.any() else mask
        return mask

    def read(self) -> None:
        """Have the matcher follow the output. The caller must hold the lock."""
        for token_id in self.output[self._read :]:
            self.matcher.consume_token(token_id)
            data = self.grammars.tokens[token_id]
            tail = len(data) - len(data.rstrip(b"0123456789"))
            self._digits = self._digits + tail if tail == len(data) else tail
        self._read = len(self.output)


class Ahead:
    """An observer that has the masks of a pass computed while it runs."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "masks")

    def before(self, plan: Plan) -> None:
        rows = [work.request.row for work in plan.work if work.rows]
        if formed := [row for row in rows if isinstance(row, FormRow)]:
            self._pool.submit(lambda: [row.mask for row in formed])

    def after(self, plan: Plan) -> None:
        """Give requests that a parser has ended its reason."""
        for work in plan.work:
            row, output = work.request.row, work.request.output
            if isinstance(row, FormRow) and row.error and output.error:
                output.error = Refused(row.error)


class Forced:
    """Drafts for requests in a form: what the grammar forces, else those of `inner`, cut where they
    would leave it. Other requests have those of `inner`.

    A forced text can be cut into tokens in several ways, so these are drafts, too: only where the
    mask leaves one token is it certain that the sampler agrees.
    """

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Drafts]:
        drafts = self.inner.propose(requests, most)
        return [self._of(*work) for work in zip(requests, drafts, most, strict=True)]

    def forget(self, request: Request) -> None:
        self.inner.forget(request)

    def _of(self, request: Request, drafts: Drafts, most: int) -> Drafts:
        row = request.row
        if not isinstance(row, FormRow):
            return drafts
        with row.lock:
            row.read()
            drawn = getattr(self.inner, "distributions", {})  # for `Rejection`
            if forced := row.matcher.compute_ff_tokens():
                drawn.pop(request, None)
                return forced[:most]
            if request in drawn:  # a cut depends on what was drawn: the distribution would change
                return drafts
            return drafts[: row.matcher.validate_tokens(drafts)]


class Form:
    """Gives requests the form of one grammar."""

    def __init__(self, grammars: Grammars, source: str) -> None:
        """Raises UserError, as `Grammars.compile` does."""
        self.grammars, self.matcher = grammars, grammars.compile(source)

    def __call__(self, request: Request) -> None:
        request.row = FormRow(request.row, self.grammars, self.matcher.deep_copy())
