"""The JSON of answers: a whole body, or the chunks of a stream, for each of the three endpoints."""

from __future__ import annotations

import codecs
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shared.tokenizer import AnyTokenizer
from stage01_forward.generation import Logprobs, Token

from .protocol import ChatBody, CompletionBody
from .service import Answer, Choice, Format, Piece, Service
from .sse import event, written

MINUS_INFINITY = -9999.0  # JSON has no infinity
Echo = tuple[str, dict[str, list[Any]] | None]  # a prompt's text and its log-probabilities


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Token counts of all choices; a prompt counts once, however many samples it has."""
    prompts = {id(choice.prompt_ids): len(choice.prompt_ids) for choice in choices}
    prompt, completion = sum(prompts.values()), sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MINUS_INFINITY


def head(model: str, prefix: str, **fields: str) -> dict[str, Any]:
    """The fields that all chunks of an answer repeat."""
    name = f"{prefix}-{os.urandom(16).hex()}"
    return {"id": name, **fields, "created": int(time.time()), "model": model}


class Frame:
    """The event of a choice's chunk, with holes for the text and the token ids: most chunks of an
    answer differ in nothing else, and JSON of the rest is written once."""

    TEXT = "\0the text\0"

    def __init__(self, answer: Format, choice: Choice) -> None:
        (chunk,) = answer.chunks(choice, Piece(self.TEXT, (Token(-1, None, None),)))
        self.head, _, tail = event(chunk).rpartition(written(self.TEXT))
        before, ids, after = tail.partition(b"[-1]")
        self.tail, self.after = (before + b"[", b"]" + after) if ids else (tail, b"")

    def event(self, piece: Piece) -> bytes:
        text = written(piece.text)
        if not self.after:
            return b"".join((self.head, text, self.tail))
        ids = ",".join([str(token.id) for token in piece.tokens]).encode()
        return b"".join((self.head, text, self.tail, ids, self.after))


def finish(piece: Piece | Answer) -> dict[str, Any]:
    """The finish reason, and what stopped the answer if that was a stop string or token."""
    reason: dict[str, Any] = {"finish_reason": piece.finish_reason}
    return reason if piece.stop_reason is None else reason | {"stop_reason": piece.stop_reason}


def counts_on(body: CompletionBody | ChatBody) -> bool:
    """Whether each chunk has the usage so far."""
    options = body.stream_options
    return options is not None and bool(options.continuous_usage_stats)


def differs(body: CompletionBody | ChatBody, choices: Sequence[Choice]) -> bool:
    """Whether the chunks of a stream differ in more than their text."""
    return counts_on(body) or any(choice.marks for choice in choices)


def running_usage(body: CompletionBody | ChatBody, choices: Sequence[Choice]) -> dict[str, Any]:
    return {"usage": usage(choices)} if counts_on(body) else {}


class Generate:
    """POST /generate."""

    repeats = True

    def __init__(self, choices: Sequence[Choice], note: Mapping[str, str]) -> None:
        self.choices, self.note = choices, note

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return self._end(answer)

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        if piece.finish_reason is not None:
            return [self._end(piece)]
        return [{"text": piece.text}] if piece.text else []

    def last(self) -> list[dict[str, Any]]:
        return []

    def _end(self, piece: Piece | Answer) -> dict[str, Any]:
        return {
            "text": piece.text,
            "finish_reason": piece.finish_reason,
            "usage": usage(self.choices),
            **self.note,
        }


class Completion:
    """POST /v1/completions. `echoes` holds the prompts to repeat, by the index of the choice."""

    def __init__(
        self,
        body: CompletionBody,
        choices: Sequence[Choice],
        service: Service,
        echoes: Mapping[int, Echo],
    ) -> None:
        self.body, self.choices, self.tokenizer = body, choices, service.loaded.tokenizer
        self.head = head(body.model or service.name, "cmpl", object="text_completion")
        self.note = service.note(body.max_tokens, choices)
        self.repeats = not (body.logprobs is not None or differs(body, choices))
        self._echoes = dict(echoes)  # those not sent yet
        self._offsets = [
            Offsets(len(echoes.get(choice.index, ("",))[0]), service.loaded.config.eos_ids)
            for choice in choices
        ]

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(*pair) for pair in zip(self.choices, answers, strict=True)]
        return {**self.head, "choices": choices, "usage": usage(self.choices), **self.note}

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        part = self._choice(choice, piece)
        shown = part["text"] or part["logprobs"] or part["finish_reason"]
        if not (shown or self.body.return_token_ids):
            return []
        if piece.draft:
            part["draft"] = True
        note, self.note = self.note, {}  # in the first chunk
        return [{**self.head, "choices": [part], **running_usage(self.body, self.choices), **note}]

    def last(self) -> list[dict[str, Any]]:
        if not self.body.include_usage:
            return []
        return [{**self.head, "choices": [], "usage": usage(self.choices)}]

    def _choice(self, choice: Choice, piece: Piece | Answer) -> dict[str, Any]:
        index, text, logprobs = choice.index, piece.text, None
        if self.body.logprobs is not None:
            logprobs = completion_logprobs(
                self.tokenizer,
                [(token.id, token.logprobs) for token in piece.tokens],
                self._offsets[index],
            )
        if index in self._echoes:
            prompt, prompt_logprobs = self._echoes.pop(index)
            text = prompt + text
            if logprobs and prompt_logprobs:
                logprobs = {name: prompt_logprobs[name] + logprobs[name] for name in logprobs}
        part = {"index": index, "text": text, "logprobs": logprobs, **finish(piece)}
        if self.body.return_token_ids:
            part["token_ids"] = [token.id for token in piece.tokens]
        return part


class Scores:
    """POST /v1/completions with `echo` and no tokens: the log-probabilities of the prompts."""

    def __init__(
        self, body: CompletionBody, echoes: Sequence[Echo], choices: Sequence[Choice], model: str
    ) -> None:
        self.body, self.usage, self.repeats = body, usage(choices), False
        self.head = head(model, "cmpl", object="text_completion")
        self.choices = [
            {"index": index, "text": text, "logprobs": logprobs, "finish_reason": "length"}
            for index, (text, logprobs) in enumerate(echoes)
        ]

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {**self.head, "choices": self.choices, "usage": self.usage}

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        return []

    def last(self) -> list[dict[str, Any]]:
        events = [{**self.head, "choices": self.choices}]
        if self.body.include_usage:
            events.append({**self.head, "choices": [], "usage": self.usage})
        return events


class Chat:
    """POST /v1/chat/completions."""

    def __init__(self, body: ChatBody, choices: Sequence[Choice], service: Service) -> None:
        self.body, self.choices, self.tokenizer = body, choices, service.loaded.tokenizer
        self.head = head(body.model or service.name, "chatcmpl")
        self.note = service.note(body.max_completion_tokens or body.max_tokens, choices)
        self.repeats = not (body.logprobs or differs(body, choices))
        self._greeted: set[int] = set()  # choices whose role has been sent

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": answer.text},
                "logprobs": self._logprobs(answer),
                **finish(answer),
            }
            for choice, answer in zip(self.choices, answers, strict=True)
        ]
        body = {**self.head, "object": "chat.completion", "choices": choices}
        return body | {"usage": usage(self.choices), **self.note}

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        events = []
        if choice.index not in self._greeted:
            self._greeted.add(choice.index)
            role = {"role": "assistant", "content": ""}
            events.append(self.chunk(choice, role, Piece("", ())))
        if piece.text or piece.finish_reason or self.body.logprobs:
            delta = {"content": piece.text} if piece.text else {}
            events.append(self.chunk(choice, delta, piece))
        return events

    def last(self) -> list[dict[str, Any]]:
        if not self.body.include_usage:
            return []
        end = {"object": "chat.completion.chunk", "choices": [], "usage": usage(self.choices)}
        return [{**self.head, **end}]

    def chunk(self, choice: Choice, delta: dict[str, Any], piece: Piece) -> dict[str, Any]:
        part = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            **finish(piece),
            **({"draft": True} if piece.draft else {}),
        }
        chunk = {**self.head, "object": "chat.completion.chunk", "choices": [part], **self.note}
        self.note = {}  # in the first chunk
        return chunk | running_usage(self.body, self.choices)

    def _logprobs(self, piece: Piece | Answer) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        scored = [(token.id, token.logprobs) for token in piece.tokens if token.logprobs]
        return {"content": [self._scored_token(*pair) for pair in scored]}

    def _scored_token(self, token_id: int, logprobs: Logprobs) -> dict[str, Any]:
        top = [self._token(*pair) for pair in logprobs.top]
        return {**self._token(token_id, logprobs.token), "top_logprobs": top}

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
    """Where tokens are in a text that begins with `start` characters before them; tokens of
    `eos_ids` have no text."""

    def __init__(self, start: int = 0, eos_ids: Sequence[int] = ()) -> None:
        self._characters, self._eos_ids = start, eos_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token_id: int, data: bytes) -> int:
        """The place of the first character that has bytes of the next token, whose bytes are
        `data`."""
        if token_id in self._eos_ids or not data:
            return self._characters
        self._characters += len(self._utf8.decode(data[:1]))
        unfinished = bool(self._utf8.getstate()[0])  # then its character is still to come
        place = self._characters - (0 if unfinished else 1)
        self._characters += len(self._utf8.decode(data[1:]))
        return place


def completion_logprobs(
    tokenizer: AnyTokenizer, scored: Sequence[tuple[int, Logprobs | None]], offsets: Offsets
) -> dict[str, list[Any]]:
    """Log-probabilities of tokens as completions have them."""
    columns: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, logprobs in scored:
        text, score, top = token_text(tokenizer, token_id), None, None
        if logprobs is not None:
            score = finite(logprobs.token)
            top = {token_text(tokenizer, other): finite(value) for other, value in logprobs.top}
            top.setdefault(text, score)
        offset = offsets.next(token_id, tokenizer.decode_bytes([token_id]))
        for column, value in zip(columns.values(), (text, score, top, offset), strict=True):
            column.append(value)
    return columns
