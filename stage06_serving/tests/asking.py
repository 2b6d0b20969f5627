"""Requests for tests of the endpoints, with OpenAI's client and without it."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families

from shared.catalog import STORIES
from shared.tokenizer import Tokenizer

PROMPT, OTHER = "Once upon a time", "The old fox looked at the river"
CHAT = [{"role": "user", "content": "Tell me a story."}]
TOKENIZER = Tokenizer.from_folder(STORIES)
GREEDY: dict[str, Any] = {"model": "stories", "temperature": 0}
TOKENS = 8  # of an answer by default: the sanitizer checks the memory after every step
IGNORE: dict[str, Any] = {"ignore_eos": True}
JSON = "Content-Type: application/json"
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
LARGEST_ERROR = 2048  # bytes
HANG = 60.0  # seconds: on an idle machine nothing here takes a tenth of that


def until(condition: Callable[[], object], what: Callable[[], object] = str) -> None:
    """Wait until `condition` holds. Fails with the text of `what` after HANG seconds. It looks ever
    more rarely: a look may cost a server or a browser more than what is waited for."""
    deadline, pause = time.monotonic() + HANG, 0.01
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {HANG:g} s: {what()}"
        time.sleep(pause)
        pause = min(1.3 * pause, 0.1)


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


def ask(server: Any, method: str, path: str, **options: Any) -> httpx2.Response:
    options = {"trust_env": False, "verify": False, "timeout": HANG} | options
    return httpx2.request(method, server.url + path, **options)


def post(server: Any, path: str = "/v1/completions", **options: Any) -> httpx2.Response:
    return ask(server, "POST", path, **options)


def get(server: Any, path: str, **options: Any) -> httpx2.Response:
    return ask(server, "GET", path, **options)


def events(text: str) -> list[Any]:
    """The data of a stream, to its end: [DONE] must be last."""
    *lines, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def first_frame(server: Any) -> dict[str, Any]:
    """The state of a server, as the page would show it."""
    with httpx2.stream("GET", f"{server.url}/live", trust_env=False, timeout=HANG) as live:
        line = next(line for line in live.iter_lines() if line)
    return json.loads(line.removeprefix("data: "))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def numbers_of(text: str) -> dict[str, float]:
    """Metrics by name and labels, without the label of the model."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f'{name}="{value}"' for name, value in sample.labels.items()]
            kept = ",".join(label for label in labels if not label.startswith("model_name="))
            values[sample.name + (f"{{{kept}}}" if kept else "")] = sample.value
    return values


def read_metrics(server: Any, key: str = "none") -> dict[str, float]:
    return numbers_of(get(server, "/metrics", headers=bearer(key)).text)


def until_idle(server: Any) -> dict[str, float]:
    """The server's metrics once nothing runs or waits and no block is owned."""
    seen: list[dict[str, float]] = []

    def idle() -> bool:
        seen.append(read_metrics(server))
        return not any(seen[-1][name] for name in IDLE)

    until(idle, lambda: {name: seen[-1][name] for name in IDLE})
    return seen[-1]


def ended(numbers: Mapping[str, float]) -> dict[str, float]:
    """Sequences that have ended, by reason, from a server's metrics."""
    name = 'vllm:request_success_total{finished_reason="%s"}'
    return {reason: numbers[name % reason] for reason in ("stop", "length", "abort", "error")}


def written(target: str, *headers: str, method: str = "GET", host: str = "localhost") -> bytes:
    """The head of a request."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *headers, "", ""]
    return "\r\n".join(lines).encode(errors="surrogateescape")


def posted(body: Any, path: str = "/v1/completions") -> bytes:
    """A whole request with a body of JSON."""
    content = json.dumps(body).encode()
    return written(path, JSON, f"Content-Length: {len(content)}", method="POST") + content


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


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1])
