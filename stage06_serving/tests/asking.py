"""Requests for tests of the endpoints, with OpenAI's client and without it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
import openai

from shared.checkpoint import STORIES
from shared.server import OwnServer
from shared.tokenizer import Tokenizer

PROMPT, OTHER = "Once upon a time", "The old fox looked at the river"
CHAT = [{"role": "user", "content": "Tell me a story."}]
TOKENIZER = Tokenizer.from_folder(STORIES)
GREEDY: dict[str, Any] = {"model": "stories", "temperature": 0}
TOKENS = 8  # of an answer by default: the sanitizer checks the memory after every step
IGNORE: dict[str, Any] = {"ignore_eos": True}


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(prompt=prompt, **{**GREEDY, "max_tokens": TOKENS, **fields})


def first(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    """The first choice of a completion."""
    return complete(client, prompt, **fields).choices[0]


def chat(client: openai.OpenAI, messages: Any = CHAT, **fields: Any) -> Any:
    options = {**GREEDY, "max_completion_tokens": TOKENS, **fields}
    return client.chat.completions.create(messages=messages, **options)


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    texts = (each.delta.content if hasattr(each, "delta") else each.text for each in choices)
    return "".join(text or "" for text in texts)


def counts(answer: Any) -> tuple[int, int, int]:
    """Tokens of prompts, of answers, and of both."""
    usage = answer.usage
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def post(server: OwnServer, path: str = "/v1/completions", **options: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, trust_env=False, verify=False, timeout=60, **options)


def get(server: OwnServer, path: str, **options: Any) -> httpx2.Response:
    return httpx2.get(server.url + path, trust_env=False, verify=False, timeout=60, **options)


def events(text: str) -> list[Any]:
    """The data of a stream, to its end: [DONE] must be last."""
    *lines, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def first_frame(server: OwnServer) -> dict[str, Any]:
    """The state of a server as a page shows it."""
    with httpx2.stream("GET", f"{server.url}/live", trust_env=False, timeout=60) as live:
        line = next(line for line in live.iter_lines() if line)
    return json.loads(line.removeprefix("data: "))


def ended(numbers: Mapping[str, float]) -> dict[str, float]:
    """Of a server's metrics: sequences that have ended, by reason."""
    name = 'vllm:request_success_total{finished_reason="%s"}'
    return {reason: numbers[name % reason] for reason in ("stop", "length", "abort", "error")}


@contextlib.contextmanager
def connected(server: Any, data: bytes) -> Iterator[socket.socket]:
    """A client that sends `data` and leaves at the end of the block."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        with contextlib.suppress(ConnectionError):  # it may be closed already
            connection.sendall(data)
        yield connection


def exchange(server: Any, data: bytes) -> bytes:
    """The answer to these bytes, once the server has closed. Fails if it never does."""
    received = bytearray()
    with connected(server, data) as client, contextlib.suppress(ConnectionError):
        while more := client.recv(2**16):
            received += more
    return bytes(received)
