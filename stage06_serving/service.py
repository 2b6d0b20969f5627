"""From a request's body to the pieces of its answers: ids, sampling, admission, text. No HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic_core import to_json

from shared.cli import Loaded
from shared.errors import UserError
from stage01_forward.generation import Token

from .async_engine import AsyncEngine, Overloaded, Prepare, Ticket, TooMany
from .chat import NO_TEMPLATE, ChatTemplate, OwnTemplate, Tools
from .errors import ApiError
from .protocol import (
    DEFAULT_TOKENS,
    ChatBody,
    CompletionBody,
    GenerateBody,
    Message,
    OpenAIBody,
    SamplingBody,
)
from .scoring import ScoredRequest
from .text import TextStream

LONG_TEXT = 8_192  # characters or tokens: longer texts are tokenized off the event loop
LONGEST_TOKEN = 128  # characters, in GPT-2: a longer prompt is too long without tokenizing it
MOST_SCORES = 50_000  # log-probabilities in one body
MOST_TEXTS = 32  # texts for /tokenize that wait for the worker; more get 503
PART = 4_096  # tokens that are written at once: no other thread runs meanwhile
Result = TypeVar("Result")
FIELD = re.compile(rf"\b({'|'.join(SamplingBody.model_fields)}|logprobs)\b")  # in an error


async def off_loop(long: bool, work: Callable[..., Result], *arguments: object) -> Result:
    """The result of `work`: on a thread if it is long, else at once."""
    return await asyncio.to_thread(work, *arguments) if long else work(*arguments)


class Piece(NamedTuple):
    """A part of one answer, as a stream sends it."""

    text: str
    tokens: Sequence[Token]  # new ones; the text of some may still be held back
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    draft: bool = False  # whether the tokens are accepted drafts, where they are marked


@dataclass
class Choice:
    """One answer in the making."""

    index: int
    prompt_ids: list[int]
    ticket: Ticket
    text: TextStream
    completion_tokens: int = 0
    ended: bool = False  # nothing more will be read
    marks: bool = False  # accepted drafts come in pieces of their own

    def drafts(self) -> int:
        """How many of the next tokens are accepted drafts: all of a step's but the last."""
        ends = self.ticket.ends
        while ends and ends[0] <= self.completion_tokens:
            ends.popleft()
        return ends[0] - self.completion_tokens - 1 if ends else 0


def due(choices: Sequence[Choice], interval: int) -> bool:
    """Whether to read `choices` now: `interval` tokens have gathered in one, one has ended, or a
    stop string may end one."""
    return any(
        choice.ticket.ended or len(choice.ticket.fresh) >= interval or choice.text.may_stop
        for choice in choices
        if not choice.ended
    )


@dataclass
class Answer:
    """A whole answer, for clients that do not stream."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Format(Protocol):
    """How one request is answered."""

    @property
    def repeats(self) -> bool:
        """Whether a choice's chunks before its end differ only in text and token ids, from the
        second on."""
        ...

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """The events for one piece of a stream; none while all its text is held back."""
        ...

    def last(self) -> list[dict[str, Any]]:
        """The events that end a stream."""
        ...


class Forms(Protocol):
    """Made once for a loaded model, from the arguments of `NoForms`."""

    chat_body: type[ChatBody]
    completion_body: type[CompletionBody]

    async def prepare(self, body: ChatBody | CompletionBody) -> Prepare | None:
        """What gives the requests of `body` their form; None: they have none. Raises ApiError for a
        form that cannot be enforced."""

    def conversation(self, body: ChatBody) -> tuple[Sequence[Message], Tools | None]:
        """The messages for the chat template, and the tools, if it is the one to show them."""

    def answer(self, body: ChatBody, choices: Sequence[Choice], service: Service) -> Format:
        """How the chat is answered."""


class Service:
    """The work of the endpoints, without HTTP. `name` is what clients call the model."""

    def __init__(
        self,
        engine: AsyncEngine,
        loaded: Loaded,
        name: str,
        template: ChatTemplate | OwnTemplate | None,
        forms: Forms,
        timeout: float,
        stream_interval: int = 1,
    ) -> None:
        """forms: of answers. timeout: seconds per request. stream_interval: tokens that a stream
        gathers before it sends them."""
        self.engine, self.loaded, self.name = engine, loaded, name
        self.template, self.timeout, self.stream_interval = template, timeout, stream_interval
        self.forms = forms
        self._worker, self._texts = ThreadPoolExecutor(1, "long-work"), 0

    @property
    def context(self) -> int:
        """The most tokens of prompt and answer together."""
        return self.loaded.config.n_positions

    @property
    def names(self) -> list[str]:
        """What clients may call a model: the model itself, and the engine's variants of it."""
        return [self.name, *self.engine.engine.variants]

    def check_model(self, name: str | None) -> bytes:
        """The end of the salt of a request for the model `name`. Raises ApiError 404 for an unknown
        name."""
        if name is None or name == self.name:
            return b""
        if name not in self.engine.engine.variants:
            known = ", ".join(f"'{other}'" for other in self.names)
            message = f"The model {name[:100]!r} does not exist: this server has {known}."
            raise ApiError(404, message, "model")
        return self.engine.engine.variants[name]

    async def all_prompt_ids(
        self, prompts: Sequence[str | list[int]], field: str = "prompt"
    ) -> list[list[int]]:
        """The ids of each prompt from `field` of a body. Raises ApiError."""
        long = sum(map(len, prompts)) > LONG_TEXT
        # One by one: other clients' texts have their turn between two.
        return [await off_loop(long, self.prompt_ids, prompt, field) for prompt in prompts]

    def prompt_ids(self, prompt: str | list[int], field: str = "prompt") -> list[int]:
        """The ids of a prompt. Raises ApiError if it does not fit into the context."""
        most = self.context - 1
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ApiError(400, "The prompt is empty: send some text.", field)
            if len(prompt) > most * LONGEST_TOKEN:
                message = (
                    f"The prompt has {len(prompt)} characters, certainly more than the {most} "
                    "tokens allowed: shorten it."
                )
                raise ApiError(400, message, field)
            try:
                prompt = self.loaded.tokenizer.encode(prompt)
            except UserError as error:
                raise ApiError(400, str(error), field) from None
        if len(prompt) > most:
            message = (
                f"This model's maximum context length is {self.context} tokens, answer included, "
                f"and the prompt has {len(prompt)}: shorten it to at most {most}."
            )
            raise ApiError(400, message, field)
        return prompt

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise ApiError for an id that is not in the vocabulary."""
        size, largest = self.loaded.config.vocab_size, max(ids, default=0)
        if largest >= size:
            message = f"Token id {largest} is not in the vocabulary: send ids from 0 to {size - 1}."
            raise ApiError(400, message, field)

    def check_scores(self, tokens: int, top: int) -> None:
        """Raise ApiError if `tokens` tokens with `top` alternatives each are too many for one body:
        while the server writes it, no other client is served."""
        count = tokens * (1 + top)
        if count > MOST_SCORES:
            message = (
                f"The answer may have {count} log-probabilities, and at most {MOST_SCORES} are "
                "allowed: ask for fewer tokens, prompts or 'logprobs', or for a stream."
            )
            raise ApiError(400, message, "logprobs")

    # ---- from body to choices -------------------------------------------------------------------

    async def generate(self, body: GenerateBody, salt: bytes) -> list[Choice]:
        prompts = await self.all_prompt_ids([body.prompt])
        return self.begin(
            body, prompts, 1, self.limit(body.max_tokens, DEFAULT_TOKENS), None, body.stops, salt
        )

    async def complete(self, body: CompletionBody, salt: bytes) -> list[Choice]:
        """Raises ApiError, UserError, Overloaded, EngineDead, as `generate` and `chat` do."""
        salt += self.check_model(body.model)
        prompts = await self.all_prompt_ids(body.prompts)
        # Where only prompts are scored, a token ends each, and is not sent.
        max_tokens = 1 if body.max_tokens == 0 and body.echo else body.max_tokens
        limit = self.limit(max_tokens, DEFAULT_TOKENS)
        form, n = await self.forms.prepare(body), body.n or 1
        return self.begin(body, prompts, n, limit, body.logprobs, body.stops, salt, form)

    async def chat(self, body: ChatBody, salt: bytes) -> list[Choice]:
        salt += self.check_model(body.model)
        form = await self.forms.prepare(body)
        ids = await self.chat_ids(*self.forms.conversation(body))
        stops = [*body.stops, *(self.template.stops if self.template else ())]
        max_tokens = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit = self.limit(max_tokens, self.context - len(ids))
        return self.begin(body, [ids], body.n or 1, limit, logprobs, stops, salt, form)

    async def chat_ids(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """The ids of a chat's prompt. Raises ApiError."""
        if self.template is None:
            raise ApiError(400, NO_TEMPLATE, "messages")
        try:  # off the event loop: a template may take its time
            render: Callable[..., str | list[int]] = self.template.prompt
            prompt = await asyncio.to_thread(render, messages, tools)
        except UserError as error:
            raise ApiError(400, str(error), "messages") from None
        (ids,) = await self.all_prompt_ids([prompt], "messages")
        return ids

    def limit(self, max_tokens: int | None, default: int) -> int:
        """The most tokens of an answer. Raises ApiError."""
        if max_tokens == 0:
            raise ApiError(400, "'max_tokens' must be at least 1.", "max_tokens")
        return min(max_tokens or default, self.context)

    def note(self, limit: int | None, choices: Sequence[Choice]) -> dict[str, str]:
        """The field `warning` of an answer that cannot have as many tokens as `limit`."""
        room = self.context - max((len(choice.prompt_ids) for choice in choices), default=0)
        if limit is None or limit <= room:
            return {}
        return {"warning": f"max_tokens was cut from {limit} to {room}, the rest of the context."}

    def begin(
        self,
        body: SamplingBody,
        prompts: Sequence[list[int]],
        n: int,
        limit: int,
        logprobs: int | None,
        stops: Sequence[str],
        salt: bytes,
        form: Prepare | None = None,
    ) -> list[Choice]:
        """Submit `n` choices for each prompt to the engine, each in the form that `form` gives its
        request. Choices of one prompt are adjacent."""
        scored = logprobs if isinstance(body, CompletionBody) and body.echo else None
        if scored is not None:
            self.check_scores(sum(map(len, prompts)), scored)
        if logprobs is not None and not body.stream:
            self.check_scores(len(prompts) * n * limit, logprobs)
        try:
            params = [body.params(limit, logprobs, sample) for sample in range(n)]
            wants = None if scored is None else partial(ScoredRequest, top=scored)
            groups = self.engine.submit(prompts, params, salt, wants, form)
        except UserError as error:
            named = FIELD.search(str(error))
            several = isinstance(error, TooMany) and n > 1
            field = named[0] if named else "n" if several else "prompt"
            raise ApiError(400, str(error), field) from None
        eos_ids, keep = self.loaded.config.eos_ids, bool(body.include_stop_str_in_output)
        wanted = isinstance(body, OpenAIBody) and bool(body.mark_drafts)
        marks = wanted and self.engine.engine.drafts is not None
        choices: list[Choice] = []
        for ids, tickets in zip(prompts, groups, strict=True):
            for ticket in tickets:
                text = TextStream(self.loaded.tokenizer, eos_ids, stops, keep, body.min_tokens or 0)
                choices.append(Choice(len(choices), ids, ticket, text, marks=marks))
        return choices

    # ---- from choices to text -------------------------------------------------------------------

    def pieces(
        self, choices: Sequence[Choice], most: int | None = None
    ) -> Iterator[tuple[Choice, Piece]]:
        """What is new in the text of `choices`, in pieces of at most `most` tokens; the last piece
        of each has its finish reason.

        Raises Broken, EngineDead.
        """
        for choice in choices:
            while piece := self.piece(choice, most):
                yield choice, piece

    def piece(self, choice: Choice, most: int | None = None) -> Piece | None:
        """What is new in the text of `choice`, from at most `most` tokens; None if nothing is.
        Raises Broken, EngineDead."""
        if choice.ended:
            return None
        drafts = choice.drafts() if choice.marks else 0
        tokens = self.engine.read(choice.ticket, max(1, drafts) if choice.marks else most)
        if not tokens:
            choice.ended = choice.ticket.ended
            return None
        piece = self._piece(choice, tokens)
        if drafts:
            piece = piece._replace(draft=True)
        if piece.finish_reason is not None:
            choice.ended = True
            self.engine.abort(choice.ticket, piece.finish_reason)  # needed after a stop string
        return piece

    def _piece(self, choice: Choice, tokens: Sequence[Token]) -> Piece:
        text, stream = "", choice.text
        for count, token in enumerate(tokens, 1):
            choice.completion_tokens += 1
            text += stream.push(token.id)
            if stream.stop is None and token.finish_reason is not None:
                text += stream.flush()
            if stream.stop is not None:
                return Piece(text, tokens[:count], "stop", stream.stop)
            if token.finish_reason is not None:
                stopped = token.finish_reason == "stop"
                by_id = stopped and token.id not in self.loaded.config.eos_ids
                return Piece(text, tokens[:count], token.finish_reason, token.id if by_id else None)
        return Piece(text, tokens)

    async def decode(self, ids: Sequence[int]) -> str:
        return await off_loop(len(ids) > LONG_TEXT, self.loaded.tokenizer.decode, ids)

    async def in_turn(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Do long work on the one thread for it: several at once would hold up the event loop, as
        each takes the interpreter from it for milliseconds. What is cancelled leaves the queue."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)

    async def tokenized(self, text: str, strings: bool) -> bytes:
        """The answer of /tokenize for a text. Raises ApiError, and Overloaded while many long texts
        wait."""
        long, encode = len(text) > LONG_TEXT, self.loaded.tokenizer.encode
        if long and self._texts >= MOST_TEXTS:
            raise Overloaded("Many long texts wait to be tokenized: try again in a moment.")
        self._texts += long
        try:
            if long:
                return await self.in_turn(lambda: self.tokens_json(encode(text), strings))
            return self.tokens_json(encode(text), strings)
        except UserError as error:
            raise ApiError(400, str(error), "prompt") from None
        finally:
            self._texts -= long

    def tokens_json(self, ids: Sequence[int], strings: bool) -> bytes:
        """The body of an answer with `ids`, and if `strings` the text of each by itself; written
        in parts."""

        def array(of: Callable[[Sequence[int]], list[object]]) -> bytes:
            parts = [ids[at : at + PART] for at in range(0, len(ids), PART)]
            return b",".join([to_json(of(part))[1:-1] for part in parts])

        decode = self.loaded.tokenizer.decode
        fields = [b'"tokens":[%b]' % array(list)]
        if strings:
            fields.append(b'"token_strs":[%b]' % array(lambda part: [decode([t]) for t in part]))
        counts = to_json({"count": len(ids), "max_model_len": self.context})
        return b",".join([counts.removesuffix(b"}"), *fields]) + b"}"
