"""From a request's body to the pieces of its answers: ids, sampling, admission, text. No HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from shared.cli import Loaded
from shared.errors import UserError
from stage01_forward.generation import Logprobs, Token

from .async_engine import AsyncEngine, Prepare, Ticket, TooMany
from .chat import NO_TEMPLATE, Template, Tools
from .errors import ApiError
from .protocol import ChatBody, CompletionBody, GenerateBody, Message, OpenAIBody, SamplingBody
from .scoring import ScoredRequest
from .text import TextStream

DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
LONG_TEXT = 8_192  # characters: longer texts are tokenized off the event loop
LONGEST_TOKEN = 128  # characters, in GPT-2: a longer prompt is too long without tokenizing it
MOST_SCORES = 50_000  # log-probabilities in one body
READ = 256  # tokens in a piece, at most
GATHERED = 64  # tokens of a whole answer that are read at a time
FIELD = re.compile(rf"\b({'|'.join(SamplingBody.model_fields)}|logprobs)\b")  # in an error


class Piece(NamedTuple):
    """A part of one answer, as a stream sends it, or all of it."""

    text: str
    tokens: Sequence[Token]  # new ones; the text of some may still be held back
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it


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
    """Answers in a given form, such as JSON, which a later stage brings. Made once for a loaded
    model."""

    chat_body: type[ChatBody]
    completion_body: type[CompletionBody]

    async def prepare(self, body: ChatBody | CompletionBody) -> Prepare | None:
        """What gives the requests of `body` their form; None: they have none. Raises ApiError for a
        form that cannot be enforced."""

    def conversation(self, body: ChatBody) -> tuple[Sequence[Message], Tools | None]:
        """The messages for the chat template, and the tools, if it is the one to show them."""

    def answer(self, generation: Generation, body: ChatBody) -> Any:
        """How a chat is answered: a Format of formats.py."""


class Generation:
    """A request that the engine has. Its choices are in the order of the prompts; those of one
    prompt are adjacent."""

    def __init__(
        self, service: Service, body: SamplingBody, choices: Sequence[Choice], deadline: float
    ) -> None:
        """deadline: event-loop time by which the answer must be made."""
        self.service, self.body, self.choices, self.deadline = service, body, choices, deadline

    async def pieces(self, gather: int = 1) -> AsyncIterator[tuple[Choice, Piece]]:
        """What is new in the text of the choices, as it comes; the last piece of each has its
        finish reason. gather: tokens to wait for. Raises Broken, EngineDead, UserError,
        TimeoutError."""
        news = asyncio.Event()

        def tell() -> None:
            if any(c.ticket.ended or len(c.ticket.fresh) >= gather for c in self.choices):
                news.set()

        for choice in self.choices:
            choice.ticket.news = tell
        while True:
            for choice in self.choices:
                while piece := self.service.piece(choice):
                    yield choice, piece
            if all(choice.ended for choice in self.choices):
                return
            async with asyncio.timeout_at(self.deadline):
                await news.wait()
            news.clear()

    async def whole(self) -> list[Piece]:
        """The whole answers. Raises what `pieces` does."""
        parts: list[list[Piece]] = [[] for _ in self.choices]
        # A stop string ends an answer before the engine does, so each token is looked at.
        gather = 1 if any(choice.text.may_stop for choice in self.choices) else GATHERED
        async for choice, piece in self.pieces(gather):
            parts[choice.index].append(piece)
        return [
            Piece(
                "".join(piece.text for piece in pieces),
                [token for piece in pieces for token in piece.tokens],
                *pieces[-1][2:],
            )
            for pieces in parts
        ]

    async def scores(self) -> list[list[Logprobs | None]]:
        """The log-probabilities of the prompts, where the body asks for them. Raises what `pieces`
        does."""
        async with asyncio.timeout_at(self.deadline):
            first = self.choices[:: getattr(self.body, "n", None) or 1]
            return [await self.service.engine.result(choice.ticket) for choice in first]

    def release(self) -> None:
        """End what has not ended."""
        for choice in self.choices:
            self.service.engine.abort(choice.ticket)

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts of all choices; a prompt counts once, however many samples it has."""
        prompts = {id(choice.prompt_ids): choice for choice in reversed(self.choices)}
        prompt = sum(len(choice.prompt_ids) for choice in prompts.values())
        completion = sum(choice.completion_tokens for choice in self.choices)
        cached = sum(choice.ticket.cached_tokens for choice in prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Service:
    """The work of the endpoints, without HTTP. `name` is what clients call the model."""

    def __init__(
        self,
        engine: AsyncEngine,
        loaded: Loaded,
        name: str,
        template: Template | None,
        forms: Forms,
        timeout: float,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """timeout: seconds per request. defaults: sampling options of requests that do not give
        them."""
        self.engine, self.loaded, self.name = engine, loaded, name
        self.template, self.forms, self.timeout = template, forms, timeout
        self.defaults = {"temperature": 1.0} if defaults is None else defaults  # OpenAI's

    @property
    def context(self) -> int:
        """The most tokens of prompt and answer together."""
        return self.loaded.config.n_positions

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for an unknown name."""
        if name not in (None, self.name):
            message = f"The model {name[:100]!r} does not exist: this server has '{self.name}'."
            raise ApiError(404, message, "model")

    # ---- from body to generation ----------------------------------------------------------------

    async def generate(self, body: GenerateBody, tenant: bytes) -> Generation:
        """Hand the engine a request; its prompts share cached blocks with those of the same
        `tenant` only. Raises ApiError, Overloaded, EngineDead, as `complete` and `chat` do."""
        return await self._begin(body, [body.prompt], body.max_tokens, DEFAULT_TOKENS, tenant)

    async def complete(self, body: CompletionBody, tenant: bytes) -> Generation:
        form, score = await self.forms.prepare(body), body.logprobs if body.echo else None
        # Where only prompts are scored, a token ends each, and is not sent.
        limit = 1 if body.max_tokens == 0 and body.echo else body.max_tokens
        options: dict[str, Any] = {"logprobs": body.logprobs, "score": score, "form": form}
        return await self._begin(body, body.prompts, limit, DEFAULT_TOKENS, tenant, **options)

    async def chat(self, body: ChatBody, tenant: bytes) -> Generation:
        self.check_model(body.model)
        form, ids = await self.forms.prepare(body), await self.chat_ids(body)
        limit = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        options: dict[str, Any] = {"logprobs": logprobs, "form": form, "stops": self._stops}
        return await self._begin(body, [ids], limit, self.context - len(ids), tenant, **options)

    @property
    def _stops(self) -> Sequence[str]:
        return self.template.stops if self.template else ()

    async def chat_ids(self, body: ChatBody) -> list[int]:
        """The ids of a chat's prompt. Raises ApiError."""
        if self.template is None:
            raise ApiError(400, NO_TEMPLATE, "messages")
        try:  # off the event loop: a template may take its time
            messages, tools = self.forms.conversation(body)
            render: Callable[..., str | list[int]] = self.template.prompt
            prompt = await asyncio.to_thread(render, messages, tools)
        except UserError as error:
            raise ApiError(400, str(error), "messages") from None
        return await self.ids_of(prompt, "messages")

    async def ids_of(self, prompt: str | list[int], field: str = "prompt") -> list[int]:
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
            prompt = await self.encode(prompt, field)
        if len(prompt) > most:
            message = (
                f"This model's maximum context length is {self.context} tokens, answer included, "
                f"and the prompt has {len(prompt)}: shorten it to at most {most}."
            )
            raise ApiError(400, message, field)
        return prompt

    async def encode(self, text: str, field: str = "prompt") -> list[int]:
        """The ids of a text. Raises ApiError."""
        encode = self.loaded.tokenizer.encode
        try:
            return await off_loop(len(text) > LONG_TEXT, encode, text)
        except UserError as error:
            raise ApiError(400, str(error), field) from None

    async def _begin(
        self,
        body: SamplingBody,
        prompts: Sequence[str | list[int]],
        max_tokens: int | None,
        default_tokens: int,
        tenant: bytes,
        logprobs: int | None = None,
        score: int | None = None,
        form: Prepare | None = None,
        stops: Sequence[str] = (),
    ) -> Generation:
        """Submit `n` choices for each prompt. score: likeliest tokens beside each of a prompt's;
        None: prompts are not scored. form: gives each request its form."""
        deadline = asyncio.get_running_loop().time() + self.timeout
        n = 1
        if isinstance(body, OpenAIBody):
            self.check_model(body.model)
            n = body.n or 1
        if max_tokens == 0:
            raise ApiError(400, "'max_tokens' must be at least 1.", "max_tokens")
        limit = min(max_tokens or default_tokens, self.context)
        ids = [await self.ids_of(prompt) for prompt in prompts]
        if score is not None:
            check_scores(sum(map(len, ids)), score)
        if logprobs is not None and not body.stream:
            check_scores(len(ids) * n * limit, logprobs)
        wants = None if score is None else partial(ScoredRequest, top=score)
        try:
            params = [body.params(limit, logprobs, sample, self.defaults) for sample in range(n)]
            groups = self.engine.submit(ids, params, tenant, wants, form)
        except UserError as error:
            named = FIELD.search(str(error))
            several = isinstance(error, TooMany) and n > 1
            field = named[0] if named else "n" if several else "prompt"
            raise ApiError(400, str(error), field) from None
        eos_ids, keep = self.loaded.config.eos_ids, bool(body.include_stop_str_in_output)
        options = eos_ids, [*body.stops, *stops], keep, body.min_tokens or 0
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
        tokens = self.engine.read(choice.ticket, READ)
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
                return Piece(text, tokens[:count], "stop", stream.stop)
            if token.finish_reason is not None:
                stopped = token.finish_reason == "stop"
                by_id = stopped and token.id not in self.loaded.config.eos_ids
                return Piece(text, tokens[:count], token.finish_reason, token.id if by_id else None)
        return Piece(text, tokens)


async def off_loop(long: bool, work: Callable[..., Any], *arguments: object) -> Any:
    """The result of `work`: on a thread if it is long, else at once."""
    return await asyncio.to_thread(work, *arguments) if long else work(*arguments)


def check_scores(tokens: int, top: int) -> None:
    """Raise ApiError if `tokens` tokens with `top` alternatives each are too many for one body:
    while the server writes it, no other client is served."""
    count = tokens * (1 + top)
    if count > MOST_SCORES:
        message = (
            f"The answer may have {count} log-probabilities, and at most {MOST_SCORES} are "
            "allowed: ask for fewer tokens, prompts or 'logprobs', or for a stream."
        )
        raise ApiError(400, message, "logprobs")
