"""The JSON of answers: a whole body, or the chunks of a stream, for each of the three endpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

from shared.tokenizer import AnyTokenizer
from stage01_forward.generation import Logprobs

from .protocol import ChatBody, CompletionBody, GenerateBody, OpenAIBody
from .service import Choice, Generation, Piece

MINUS_INFINITY = -9999.0  # JSON has no infinity
Scored = tuple[int, Logprobs | None]  # a token: its id, and its log-probabilities


class Format(Protocol):
    """How one request is answered."""

    def whole(self, answers: Sequence[Piece]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """The events for one piece of a stream; none while all its text is held back."""

    def last(self) -> list[dict[str, Any]]:
        """The events that end a stream."""


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MINUS_INFINITY


class Generate:
    """POST /generate."""

    def __init__(self, generation: Generation, body: GenerateBody) -> None:
        self.generation = generation

    def whole(self, answers: Sequence[Piece]) -> dict[str, Any]:
        (answer,) = answers
        end = {"finish_reason": answer.finish_reason, "usage": self.generation.usage}
        return {"text": answer.text, **end}

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        if piece.finish_reason is not None:
            return [self.whole([piece])]
        return [{"text": piece.text}] if piece.text else []

    def last(self) -> list[dict[str, Any]]:
        return []


class OpenAI:
    """What completions and chats have in common."""

    def __init__(self, generation: Generation, body: OpenAIBody, prefix: str, kind: str) -> None:
        self.generation, self.tokenizer = generation, generation.service.loaded.tokenizer
        self.options = body.stream_options
        name = f"{prefix}-{os.urandom(16).hex()}"
        model = {"created": int(time.time()), "model": generation.service.name}
        self.head = {"id": name, "object": kind, **model}

    def answer(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """A whole body."""
        return {**self.head, **fields, "choices": choices, "usage": self.generation.usage}

    def last(self) -> list[dict[str, Any]]:
        wanted = self.options is not None and self.options.include_usage
        return [self.answer([])] if wanted else []


class Completion(OpenAI):
    """POST /v1/completions."""

    def __init__(self, generation: Generation, body: CompletionBody) -> None:
        self.body = body
        super().__init__(generation, body, "cmpl", "text_completion")
        echoed = generation.choices if body.echo else ()
        self._echoes = {choice.index: self._echo(choice) for choice in echoed}  # not yet sent

    def whole(self, answers: Sequence[Piece]) -> dict[str, Any]:
        pairs = zip(self.generation.choices, answers, strict=True)
        return self.answer([self._part(*pair) for pair in pairs])

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        part = self._part(choice, piece)
        if not any(part.get(name) for name in ("text", "logprobs", "finish_reason", "token_ids")):
            return []
        return [{**self.head, "choices": [part]}]

    def _part(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """One choice's text so far unsent, after its prompt the first time if that is echoed."""
        echo, scored = self._echoes.pop(choice.index, ("", []))
        scored += [(token.id, token.logprobs) for token in piece.tokens]
        part: dict[str, Any] = {"index": choice.index, "text": echo + piece.text}
        part["logprobs"] = None if self.body.logprobs is None else self._columns(scored)
        part["finish_reason"] = piece.finish_reason
        if self.body.return_token_ids:
            part["token_ids"] = [token.id for token in piece.tokens]
        return part

    def _echo(self, choice: Choice) -> tuple[str, list[Scored]]:
        """A prompt's text, and its tokens if it is scored: its first sample has the scores."""
        sent = choice.prompt
        text = sent if isinstance(sent, str) else self.tokenizer.decode(sent)
        if self.body.logprobs is None:
            return text, []
        first = self.generation.choices[choice.index // self.body.n * self.body.n]
        return text, list(zip(choice.prompt_ids, first.ticket.scores, strict=True))

    def _columns(self, scored: Sequence[Scored]) -> dict[str, list[Any]]:
        """Log-probabilities of tokens, as completions have them."""
        table: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for token_id, logprobs in scored:
            text, score, top = token_text(self.tokenizer, token_id), None, None
            if logprobs is not None:
                score, pairs = finite(logprobs.token), logprobs.top
                top = {token_text(self.tokenizer, other): finite(value) for other, value in pairs}
                top.setdefault(text, score)
            for column, value in zip(table.values(), (text, score, top), strict=True):
                column.append(value)
        return table


class Chat(OpenAI):
    """POST /v1/chat/completions."""

    def __init__(self, generation: Generation, body: ChatBody) -> None:
        self.body = body
        super().__init__(generation, body, "chatcmpl", "chat.completion.chunk")
        self._greeted: set[int] = set()  # choices whose role has been sent

    def whole(self, answers: Sequence[Piece]) -> dict[str, Any]:
        choices = []
        for choice, answer in zip(self.generation.choices, answers, strict=True):
            message = {"role": "assistant", "content": answer.text}
            choices.append(self._part(choice, answer, message=message))
        return self.answer(choices, object="chat.completion")

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        events = []
        if choice.index not in self._greeted:
            self._greeted.add(choice.index)
            greeting = {"role": "assistant", "content": ""}
            events.append(self.chunk(choice, greeting, Piece("", ())))
        if piece.text or piece.finish_reason or (self.body.logprobs and piece.tokens):
            delta = {"content": piece.text} if piece.text else {}
            events.append(self.chunk(choice, delta, piece))
        return events

    def chunk(self, choice: Choice, delta: dict[str, Any], piece: Piece) -> dict[str, Any]:
        return {**self.head, "choices": [self._part(choice, piece, delta=delta)]}

    def _part(self, choice: Choice, piece: Piece, **content: Any) -> dict[str, Any]:
        end = {"logprobs": self._logprobs(piece), "finish_reason": piece.finish_reason}
        return {"index": choice.index, **content, **end}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(token.id, token.logprobs.token),
                    "top_logprobs": [self._token(*pair) for pair in token.logprobs.top],
                }
                for token in piece.tokens
                if token.logprobs
            ]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self.tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": list(self.tokenizer.decode_bytes([token_id])),
        }


def token_text(tokenizer: AnyTokenizer, token_id: int) -> str:
    """A token by itself; if it is a part of a character its bytes, as OpenAI writes them: U+FFFD
    would stand for any of them."""
    data = tokenizer.decode_bytes([token_id])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
