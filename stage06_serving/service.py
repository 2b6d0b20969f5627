"""From a request's body to the pieces of its answers: ids, sampling, admission, text. No HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shared.cli import Loaded
from shared.errors import UserError
from stage01_forward.generation import Token

from .async_engine import AsyncEngine, Prepare, Ticket
from .chat import Template, Tools
from .errors import ApiError
from .protocol import ChatBody, CompletionBody, GenerateBody, Message, SamplingBody
from .text import TextStream

DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
LONG_TEXT = 8_192  # characters: longer texts are tokenized off the event loop
MOST_SCORES = 50_000  # log-probabilities in one body
# Seconds between two events of an answer, for each answer that runs; tokens that come sooner share
# one. With a fast model and many streams, events would take the processor that computes.
PACE = 0.0006
FIELD = re.compile(rf"\b({'|'.join(SamplingBody.model_fields)}|logprobs)\b")  # in an error


class Piece(NamedTuple):
    """A part of one answer, as a stream sends it, or all of it."""

    text: str
    tokens: Sequence[Token]  # new ones; the text of some may still be held back
    finish_reason: str | None = None


@dataclass
class Choice:
    """One answer in the making."""

    index: int
    prompt: str | list[int]  # as the client sent it, or its ids
    prompt_ids: list[int]
    ticket: Ticket
    text: TextStream
    completion_tokens: int = 0
    ended: bool = False  # nothing more will be read


class Forms(Protocol):
    """Answers in a given form, such as JSON, which a later stage brings: registry.FORMS names its
    class. Made once for a loaded model."""

    chat_body: type[ChatBody]

    async def prepare(self, body: ChatBody) -> Prepare | None:
        """What gives the requests of `body` their form; None: they have none. Raises ApiError for a
        form that cannot be enforced."""

    def conversation(self, body: ChatBody) -> tuple[Sequence[Message], Tools | None]:
        """The messages for the chat template, and the tools, if it is the one to show them."""

    def answer(self, generation: Generation, body: ChatBody) -> Any:
        """How a chat is answered: a Format of formats.py."""


@dataclass
class Generation:
    """A request that the engine has. Its choices are in the order of the prompts; those of one
    prompt are adjacent."""

    service: Service
    body: SamplingBody
    choices: Sequence[Choice]
    deadline: float  # event-loop time by which the answer must be made

    async def pieces(self) -> AsyncIterator[tuple[Choice, Piece]]:
        """What is new in the text of the choices, as it comes; the last piece of each has its
        finish reason. Raises Broken, EngineDead, UserError, TimeoutError."""
        if self.body.max_tokens == 0:  # only the prompts were of interest
            for choice in self.choices:
                self.service.engine.abort(choice.ticket, "length")
                yield choice, Piece("", (), "length")
            return
        news, loop, engine = asyncio.Event(), asyncio.get_running_loop(), self.service.engine
        sent = float("-inf")  # the first event goes at once
        for choice in self.choices:
            choice.ticket.news = news.set
        while True:
            for choice in self.choices:
                while piece := self.service.piece(choice):
                    yield choice, piece
            if all(choice.ended for choice in self.choices):
                return
            async with asyncio.timeout_at(self.deadline):
                await news.wait()
                if (early := sent + PACE * engine.status.running - loop.time()) > 0:
                    await asyncio.sleep(early)
            news.clear()
            sent = loop.time()

    async def whole(self) -> list[Piece]:
        """The whole answers. Raises what `pieces` does."""
        parts: list[list[Piece]] = [[] for _ in self.choices]
        async for choice, piece in self.pieces():
            parts[choice.index].append(piece)
        return [
            Piece(
                "".join(piece.text for piece in pieces),
                [token for piece in pieces for token in piece.tokens],
                pieces[-1].finish_reason,
            )
            for pieces in parts
        ]

    def release(self) -> None:
        """End what has not ended."""
        for choice in self.choices:
            self.service.engine.abort(choice.ticket)

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts of all choices; a prompt counts once, however many samples it has."""
        firsts = self.choices[:: getattr(self.body, "n", 1)]
        prompt = sum(len(choice.prompt_ids) for choice in firsts)
        completion = sum(choice.completion_tokens for choice in self.choices)
        cached = sum(choice.ticket.cached_tokens or 0 for choice in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


@dataclass
class Service:
    """The work of the endpoints, without HTTP."""

    engine: AsyncEngine
    loaded: Loaded
    template: Template
    forms: Forms
    timeout: float  # seconds per request
    defaults: Mapping[str, Any]  # sampling options of requests that do not give them

    def __post_init__(self) -> None:
        self.name = self.loaded.config.name
        self.context = self.loaded.config.n_positions  # tokens of prompt and answer together

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for an unknown name."""
        if name not in (None, self.name):
            message = f"The model {name[:100]!r} does not exist: this server has '{self.name}'."
            raise ApiError(404, message, "model")

    # ---- from body to generation ----------------------------------------------------------------

    async def generate(self, body: GenerateBody, tenant: bytes) -> Generation:
        """Hand the engine a request; its prompts share cached blocks with those of the same
        `tenant` only. Raises ApiError, Overloaded, EngineDead, as `complete` and `chat` do."""
        return await self._begin(body, [body.prompt], body.max_tokens or DEFAULT_TOKENS, tenant)

    async def complete(self, body: CompletionBody, tenant: bytes) -> Generation:
        """Where its prompts are scored, they are by now. Raises TimeoutError, too."""
        self.check_model(body.model)
        score = body.logprobs if body.echo else None
        limit = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        generation = await self._begin(
            body, body.prompts, limit, tenant, logprobs=body.logprobs, score=score
        )
        if score is not None:
            try:
                async with asyncio.timeout_at(generation.deadline):
                    for choice in generation.choices[:: body.n]:
                        await self.engine.begun(choice.ticket)
            except BaseException:
                generation.release()
                raise
        return generation

    async def chat(self, body: ChatBody, tenant: bytes) -> Generation:
        self.check_model(body.model)
        form = await self.forms.prepare(body)
        try:  # off the event loop: a template may take its time
            messages, tools = self.forms.conversation(body)
            ids = await asyncio.to_thread(self.template.prompt, messages, tools)
        except UserError as error:
            raise ApiError(400, str(error), "messages") from None
        limit = body.max_completion_tokens or body.max_tokens or max(1, self.context - len(ids))
        logprobs = body.top_logprobs if body.logprobs else None
        return await self._begin(
            body, [ids], limit, tenant, logprobs=logprobs, form=form, stops=self.template.stops
        )

    async def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises ApiError."""
        encode = self.loaded.tokenizer.encode
        try:
            long = len(text) > LONG_TEXT
            return await asyncio.to_thread(encode, text) if long else encode(text)
        except UserError as error:
            raise ApiError(400, str(error), "prompt") from None

    async def _begin(
        self,
        body: SamplingBody,
        prompts: Sequence[str | list[int]],
        limit: int,
        tenant: bytes,
        *,
        logprobs: int | None = None,
        score: int | None = None,
        form: Prepare | None = None,
        stops: Sequence[str] = (),
    ) -> Generation:
        """Submit `n` choices for each prompt, each of at most `limit` tokens. score: likeliest
        tokens beside each of a prompt's; None: prompts are not scored. form: gives each request its
        form."""
        deadline = asyncio.get_running_loop().time() + self.timeout
        n = getattr(body, "n", 1)
        limit = min(limit, self.context) or 1  # a token ends a prompt of which only scores are sent
        ids = [await self.encode(it) if isinstance(it, str) else it for it in prompts]
        count = 0 if score is None else sum(map(len, ids)) * (1 + score)
        if logprobs is not None and not body.stream:
            count = max(count, len(ids) * n * limit * (1 + logprobs))
        if count > MOST_SCORES:  # while they are written, no other client is served
            message = (
                f"The answer may have {count} log-probabilities, and at most {MOST_SCORES} are "
                "allowed: ask for fewer tokens, prompts or 'logprobs', or for a stream."
            )
            raise ApiError(400, message, "logprobs")
        try:
            params = [body.params(limit, logprobs, sample, self.defaults) for sample in range(n)]
            groups = self.engine.submit(ids, params, tenant, score, form)
        except UserError as error:
            named = FIELD.search(str(error))
            field = "messages" if isinstance(body, ChatBody) else "prompt"
            raise ApiError(400, str(error), named[0] if named else field) from None
        options = self.loaded.config.eos_ids, [*body.stops, *stops], body.min_tokens
        choices: list[Choice] = []
        for prompt, prompt_ids, tickets in zip(prompts, ids, groups, strict=True):
            for ticket in tickets:
                text = TextStream(self.loaded.tokenizer, *options)
                choices.append(Choice(len(choices), prompt, prompt_ids, ticket, text))
        return Generation(self, body, choices, deadline)

    # ---- from choices to text -------------------------------------------------------------------

    def piece(self, choice: Choice) -> Piece | None:
        """What is new in the text of `choice`; None if nothing is. Raises Broken, EngineDead, and
        UserError for a request whose own fault was found while it ran."""
        if choice.ended:
            return None
        tokens = self.engine.read(choice.ticket)
        if not tokens:
            choice.ended = choice.ticket.ended
            return None
        piece = self._piece(choice, tokens)
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
                return Piece(text, tokens[:count], "stop")
        return Piece(text, tokens, tokens[-1].finish_reason)
