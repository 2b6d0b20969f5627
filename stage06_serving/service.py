"""From a request's body to pieces of answers: prompts to ids, sampling, admission, text, time limits. No HTTP in here."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import torch

from shared.cli import Loaded
from stage01_forward.attention import Recompute
from stage01_forward.generation import Token
from stage01_forward.sampling import Logprobs

from .async_engine import AsyncEngine, Ticket
from .chat import NO_TEMPLATE, ChatTemplate
from .engines import AnyEngine
from .errors import ApiError
from .protocol import DEFAULT_TOKENS, ChatBody, CompletionBody, GenerateBody, SamplingBody
from .text import TextStream

LONG_TEXT = 65_536  # characters or tokens: a longer text is cut into tokens, and put together, off the event loop
LONGEST_TOKEN = 128  # characters of GPT-2's longest token: a longer prompt cannot fit, and need not be cut to know it
MOST_SCORES = 50_000  # log-probabilities in one body
NO_NUMBER = -9999.0  # in place of minus infinity, which JSON does not have


@dataclass(frozen=True)
class Piece:
    """Some more of one answer."""

    text: str
    tokens: Sequence[Token]  # those that came with it; the text of some may still be held back
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it


@dataclass
class Choice:
    """One answer: what it was asked for, and how it comes."""

    index: int
    prompt_ids: list[int]
    ticket: Ticket
    text: TextStream
    completion_tokens: int = 0
    offset: int = 0  # characters of the tokens whose log-probabilities have been given


@dataclass
class Answer:
    """A whole one, for clients that wait for all of it."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Service:
    """What the endpoints offer, without HTTP. `name` is what clients call the model."""

    def __init__(
        self,
        engine: AsyncEngine,
        loaded: Loaded,
        name: str,
        template: ChatTemplate | None,
        timeout: float,
    ) -> None:
        self.engine, self.loaded, self.name, self.template, self.timeout = (
            engine,
            loaded,
            name,
            template,
            timeout,
        )

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.loaded.config.n_positions

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for another model than the one there is."""
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"The model {name[:100]!r} does not exist: this server has '{self.name}'.",
                "model",
            )

    async def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises UserError."""
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self.loaded.tokenizer.encode, text)
        return self.loaded.tokenizer.encode(text)

    async def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """The ids of a prompt that fits. Raises ApiError."""
        most = self.context - 1
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ApiError(400, "The prompt is empty: send some text.", "prompt")
            if len(prompt) > most * LONGEST_TOKEN:
                raise ApiError(
                    400,
                    f"The prompt has {len(prompt)} characters, which cannot be {most} tokens or fewer.",
                    "prompt",
                )
            prompt = await self.encode(prompt)
        if len(prompt) > most:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.context} tokens, answer counted in, and the prompt has "
                f"{len(prompt)}: shorten it to {most} or fewer.",
                "prompt",
            )
        return prompt

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ApiError for an id that is not in the vocabulary."""
        size = self.loaded.config.vocab_size
        if wrong := next((each for each in ids if each >= size), None):
            raise ApiError(
                400, f"Token id {wrong} is not in the vocabulary: ids go from 0 to {size - 1}."
            )

    def check_scores(self, tokens: int, top: int) -> None:
        """Raise ApiError for more log-probabilities than one body should have, of `tokens` tokens and `top` others beside each:
        while it is written, nobody else is served."""
        count = tokens * (1 + top)
        if count > MOST_SCORES:
            raise ApiError(
                400,
                f"This may be {count} log-probabilities in one answer, and {MOST_SCORES} are the most: ask for fewer tokens, "
                "prompts or 'logprobs', or for a stream.",
                "logprobs",
            )

    # ---- from body to choices ---------------------------------------------------------------------------------------

    async def generate(self, body: GenerateBody, salt: bytes) -> list[Choice]:
        ids = await self.prompt_ids(body.prompt)
        return self.begin(
            body, [ids], 1, self.limit(body.max_tokens, DEFAULT_TOKENS), None, body.stops, salt
        )

    async def complete(self, body: CompletionBody, salt: bytes) -> list[Choice]:
        """Raises ApiError, UserError, Overloaded, EngineDead, as the two others do."""
        self.check_model(body.model)
        prompts = [await self.prompt_ids(prompt) for prompt in body.prompts]
        limit = self.limit(body.max_tokens, DEFAULT_TOKENS)
        return self.begin(body, prompts, body.n or 1, limit, body.logprobs, body.stops, salt)

    async def chat(self, body: ChatBody, salt: bytes) -> list[Choice]:
        self.check_model(body.model)
        if self.template is None:
            raise ApiError(400, NO_TEMPLATE, "messages")
        ids = await self.prompt_ids(self.template.prompt(body.messages))
        asked = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit = self.limit(asked, self.context - len(ids))
        return self.begin(
            body, [ids], body.n or 1, limit, logprobs, [*body.stops, *self.template.stops], salt
        )

    def limit(self, asked: int | None, default: int) -> int:
        """Tokens of an answer."""
        if asked == 0:
            raise ApiError(400, "'max_tokens' must be at least 1.", "max_tokens")
        return min(asked or default, self.context)

    def begin(
        self,
        body: SamplingBody,
        prompts: Sequence[list[int]],
        n: int,
        limit: int,
        logprobs: int | None,
        stops: Sequence[str],
        salt: bytes,
    ) -> list[Choice]:
        """Hand everything to the engine: `n` choices a prompt, those of one prompt next to each other."""
        if logprobs is not None and not body.stream:
            self.check_scores(len(prompts) * n * limit, logprobs)
        params = [body.params(limit, logprobs, sample) for sample in range(n)]
        groups = self.engine.submit(prompts, params, salt)
        eos, keep = self.loaded.config.eos_ids, bool(body.include_stop_str_in_output)
        found = [
            (ids, ticket) for ids, group in zip(prompts, groups, strict=True) for ticket in group
        ]
        return [
            Choice(
                index,
                ids,
                ticket,
                TextStream(self.loaded.tokenizer, eos, stops, keep, body.min_tokens or 0),
            )
            for index, (ids, ticket) in enumerate(found)
        ]

    # ---- from choices to text ---------------------------------------------------------------------------------------

    async def pieces(self, choice: Choice) -> AsyncGenerator[Piece, None]:
        """One choice, as it comes; the last piece has the finish reason. Left early, it is aborted. Raises Broken."""
        ticket = choice.ticket
        try:
            async with aclosing(self.engine.tokens(ticket)) as arriving:
                async for fresh in arriving:
                    piece = self._piece(choice, fresh)
                    if piece.text or piece.tokens:
                        yield piece
                    if piece.finish_reason is not None:
                        self.engine.abort(
                            ticket, piece.finish_reason
                        )  # a stop string ends what the engine would go on with
                        return
        finally:
            self.engine.abort(ticket)

    def _piece(self, choice: Choice, fresh: Sequence[Token]) -> Piece:
        text, stream = "", choice.text
        for number, token in enumerate(fresh, 1):
            choice.completion_tokens += 1
            text += stream.push(token.id)
            if stream.stop is None and token.finish_reason is not None:
                text += stream.flush()
            if stream.stop is not None:
                return Piece(text, fresh[:number], "stop", stream.stop)
            if token.finish_reason is not None:
                stopped = (
                    token.finish_reason == "stop" and token.id not in self.loaded.config.eos_ids
                )
                return Piece(
                    text, fresh[:number], token.finish_reason, token.id if stopped else None
                )
        return Piece(text, fresh)

    async def merged(self, choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """All choices at once, each piece as soon as it is there."""
        if len(choices) == 1:  # nearly always: no task and no queue between
            async with aclosing(self.pieces(choices[0])) as pieces:
                async for piece in pieces:
                    yield choices[0], piece
            return
        arriving: asyncio.Queue[tuple[Choice, Piece | None, BaseException | None]] = asyncio.Queue(
            maxsize=2 * len(choices)
        )

        async def forward(choice: Choice) -> None:
            try:
                async with aclosing(self.pieces(choice)) as pieces:
                    async for piece in pieces:
                        await arriving.put((choice, piece, None))
            except Exception as error:
                await arriving.put((choice, None, error))
            else:
                await arriving.put((choice, None, None))

        tasks = [asyncio.create_task(forward(choice)) for choice in choices]
        try:
            left = len(choices)
            while left:
                choice, made, error = await arriving.get()
                if error is not None:
                    raise error
                if made is None:
                    left -= 1
                else:
                    yield choice, made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for choice in choices:  # a task that never began has aborted nothing
                self.engine.abort(choice.ticket)

    async def score(self, prompt_ids: Sequence[int], top: int) -> list[Logprobs | None]:
        """What the model gives each token of a prompt, in the order of the prompt; None for the first, which follows nothing."""
        return await self.engine.call(lambda engine: score(engine, prompt_ids, top))

    # ---- tokens as clients see them ---------------------------------------------------------------------------------

    def token_text(self, token_id: int) -> str:
        return self.loaded.tokenizer.decode([token_id])

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Of each by itself."""
        if len(ids) > LONG_TEXT:
            return await asyncio.to_thread(list, map(self.token_text, ids))
        return [self.token_text(each) for each in ids]

    def token_bytes(self, token_id: int) -> list[int]:
        return list(self.loaded.tokenizer.decode_bytes([token_id]))


@torch.inference_mode()
def score(engine: AnyEngine, prompt_ids: Sequence[int], top: int) -> list[Logprobs | None]:
    """One pass over a prompt, for the probabilities of its own tokens. Runs on the engine's thread."""
    model = engine.model
    ids = torch.tensor(prompt_ids, device=model.device)  # (T,)
    hidden = model(ids, torch.arange(len(ids), device=model.device), Recompute().attend)  # (T, C)
    logits = model.logits(
        hidden[:-1]
    ).float()  # (T - 1, V): the last one's successor is not in the prompt
    logprobs = logits.log_softmax(-1).cpu()
    found: list[Logprobs | None] = [None]
    for row, token in enumerate(prompt_ids[1:]):
        best = logprobs[row].topk(top) if top else None
        likeliest = (
            list(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best else []
        )
        found.append(Logprobs(float(logprobs[row, token]), likeliest, float(logits[row].max())))
    return found


def number(logprob: float) -> float:
    """As JSON can say it."""
    return logprob if math.isfinite(logprob) else NO_NUMBER


def tenant(key: str) -> bytes:
    """The salt of whoever uses `key`: only their own requests share what they have in common."""
    return hashlib.sha256(key.encode()).digest() if key else b""


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens counted over all choices; the prompt of several samples counts once."""
    prompts = sum(
        len(choice.prompt_ids)
        for choice in {id(choice.prompt_ids): choice for choice in choices}.values()
    )
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": completion,
        "total_tokens": prompts + completion,
    }
