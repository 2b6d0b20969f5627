"""The JSON of answers: a whole body, or the chunks of a stream, for each of the three endpoints."""

from __future__ import annotations

import codecs
import math
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

from shared.tokenizer import AnyTokenizer
from stage01_forward.generation import Logprobs

from .protocol import ChatBody, CompletionBody, GenerateBody, OpenAIBody
from .scoring import Scores
from .service import Choice, Generation, Piece

MINUS_INFINITY = -9999.0  # JSON has no infinity


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


def finish(piece: Piece) -> dict[str, Any]:
    """The finish reason, and what stopped the answer if that was a stop string or token."""
    reason: dict[str, Any] = {"finish_reason": piece.finish_reason}
    return reason if piece.stop_reason is None else reason | {"stop_reason": piece.stop_reason}


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

    def chunk_of(self, part: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self.head, "choices": [part]}
        if self.options is not None and self.options.continuous_usage_stats:
            chunk["usage"] = self.generation.usage
        return chunk

    def last(self) -> list[dict[str, Any]]:
        wanted = self.options is not None and self.options.include_usage
        return [self.answer([])] if wanted else []


class Completion(OpenAI):
    """POST /v1/completions."""

    def __init__(self, generation: Generation, body: CompletionBody) -> None:
        self.body = body
        super().__init__(generation, body, "cmpl", "text_completion")
        self._echoes = {choice.index: self._echo(choice) for choice in generation.choices}
        eos_ids, n = generation.service.loaded.config.eos_ids, body.n or 1
        self._offsets = [Offsets(len(text), eos_ids) for text in self._echoes.values()]
        self._scores = {
            choice.index: self._prompt_logprobs(choice, generation.scores[choice.index // n])
            for choice in (generation.choices if generation.scores else ())
        }

    def whole(self, answers: Sequence[Piece]) -> dict[str, Any]:
        pairs = zip(self.generation.choices, answers, strict=True)
        return self.answer([self._part(*pair) for pair in pairs])

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        part = self._part(choice, piece)
        if not any(part.get(name) for name in ("text", "logprobs", "finish_reason", "token_ids")):
            return []
        return [self.chunk_of(part)]

    def _part(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """One choice's text so far unsent, after its prompt the first time if that is echoed."""
        index, logprobs = choice.index, None
        if self.body.logprobs is not None:
            scored = [(token.id, token.logprobs) for token in piece.tokens]
            logprobs = columns(self.tokenizer, scored, self._offsets[index])
            if before := self._scores.pop(index, None):
                logprobs = {name: before[name] + logprobs[name] for name in logprobs}
        text = self._echoes.pop(index, "") + piece.text
        part = {"index": index, "text": text, "logprobs": logprobs, **finish(piece)}
        if self.body.return_token_ids:
            part["token_ids"] = [token.id for token in piece.tokens]
        return part

    def _echo(self, choice: Choice) -> str:
        """The prompt's text, if it is to be repeated."""
        if not self.body.echo:
            return ""
        sent = choice.prompt
        return sent if isinstance(sent, str) else self.tokenizer.decode(sent)

    def _prompt_logprobs(self, choice: Choice, scores: Scores) -> dict[str, Any]:
        """The columns of a prompt. Tokens that the tokenizer puts before a text, such as BOS, have
        no text in its echo; nor has the space that sentencepiece puts before its first word."""
        ids, tokenizer = choice.prompt_ids, self.tokenizer
        start = tokenizer.encode("")
        before = len(start) if ids[: len(start)] == start else 0
        silent = before if isinstance(choice.prompt, str) else 0
        whole = tokenizer.decode_bytes(ids[silent:]).decode("utf-8", "replace")
        spaced = tokenizer.decode_bytes(ids[before : before + 1]).startswith(b" ")
        shorter = len(self._echoes[choice.index]) < len(whole)
        offsets = Offsets(0, (), silent, before if spaced and shorter else None)
        return columns(tokenizer, list(zip(ids, scores, strict=True)), offsets)


class Chat(OpenAI):
    """POST /v1/chat/completions."""

    def __init__(self, generation: Generation, body: ChatBody) -> None:
        self.body = body
        super().__init__(generation, body, "chatcmpl", "chat.completion.chunk")
        self._greeted: set[int] = set()  # choices whose role has been sent

    def whole(self, answers: Sequence[Piece]) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": answer.text},
                "logprobs": self._logprobs(answer),
                **finish(answer),
            }
            for choice, answer in zip(self.generation.choices, answers, strict=True)
        ]
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
        logprobs = self._logprobs(piece)
        return self.chunk_of(
            {"index": choice.index, "delta": delta, "logprobs": logprobs, **finish(piece)}
        )

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


class Offsets:
    """Where tokens are in a text that begins with `start` characters before them. Tokens of
    `eos_ids` and the first `silent` ones have no text; that with the number `spaced` begins with a
    space that the text has not."""

    def __init__(
        self,
        start: int = 0,
        eos_ids: Sequence[int] = (),
        silent: int = 0,
        spaced: int | None = None,
    ) -> None:
        self._characters, self._eos_ids = start, eos_ids
        self._silent, self._spaced, self._count = silent, spaced, 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token_id: int, data: bytes) -> int:
        """The place of the first character that has bytes of the next token, whose bytes are
        `data`."""
        number, self._count = self._count, self._count + 1
        data = data[number == self._spaced :]
        if number < self._silent or token_id in self._eos_ids or not data:
            return self._characters
        self._characters += len(self._utf8.decode(data[:1]))
        unfinished = bool(self._utf8.getstate()[0])  # then its character is still to come
        place = self._characters - (0 if unfinished else 1)
        self._characters += len(self._utf8.decode(data[1:]))
        return place


def columns(
    tokenizer: AnyTokenizer, scored: Sequence[tuple[int, Logprobs | None]], offsets: Offsets
) -> dict[str, list[Any]]:
    """Log-probabilities of tokens as completions have them."""
    table: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
    }  # fmt: skip
    for token_id, logprobs in scored:
        text, score, top = token_text(tokenizer, token_id), None, None
        if logprobs is not None:
            score = finite(logprobs.token)
            top = {token_text(tokenizer, other): finite(value) for other, value in logprobs.top}
            top.setdefault(text, score)
        offset = offsets.next(token_id, tokenizer.decode_bytes([token_id]))
        for column, value in zip(table.values(), (text, score, top, offset), strict=True):
            column.append(value)
    return table
