"""Helpers for tests that load a server on the tiny model and plant faults in it; the fixtures for
them are in conftest."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

HANG = 60.0  # seconds: nothing here takes longer
IDS = [10, 20, 30, 40]
LONG = {"prompt": IDS, "temperature": 0, "ignore_eos": True, "max_tokens": 200}
SHORT = LONG | {"max_tokens": 8}
SCORED = LONG | {"max_tokens": 0, "echo": True, "logprobs": 1}  # the prompt alone
DONE = "data: [DONE]"
PASS = "0.05"  # seconds more for each pass: 200 tokens take ten seconds


def post(http, running, body=SHORT):
    return http.post(f"{running.url}/v1/completions", json=body)


def post_bytes(body, path="/v1/completions"):
    """The bytes of a POST."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@contextmanager
def connected(running, data: bytes) -> Iterator[socket.socket]:
    """A client that sends `data` and leaves at the end of the block."""
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(data)
        yield connection


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def error_of(answer):
    """The error object of an answer that is no stream."""
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def events(lines):
    """The data of a stream to its end: [DONE] must be last."""
    *data, done = [line for line in lines if line]
    assert done == DONE and DONE not in data
    return [json.loads(line.removeprefix("data: ")) for line in data]


def read(lines, count):
    """The first `count` events of a stream."""
    found: list[str] = []
    while len(found) < count:
        found += [line for line in [next(lines)] if line]
    return found


def in_flight(numbers: Mapping[str, float]) -> float:
    return numbers["vllm:num_requests_running"] + numbers["vllm:num_requests_waiting"]


def ended(numbers: Mapping[str, float], reason: str) -> float:
    return numbers[f'vllm:request_success_total{{finished_reason="{reason}"}}']


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Differences of counters: ended sequences by reason, tokens, and rejected requests."""
    reasons = ("stop", "length", "abort", "error")
    counts = {reason: ended(now, reason) - ended(before, reason) for reason in reasons}
    for name, counter in (("tokens", "generation_tokens"), ("rejected", "admission_rejections")):
        counts[name] = now[f"vllm:{counter}_total"] - before[f"vllm:{counter}_total"]
    return counts
