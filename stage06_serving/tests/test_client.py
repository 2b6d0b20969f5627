"""The small client: what it prints, and one sentence for each way in which a server can fail it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from shared.errors import UserError
from stage06_serving import client as small
from stage06_serving.tests.conftest import House, Running

PROMPT = "Once upon a time"
CHUNK = {"choices": [{"index": 0, "text": " a", "finish_reason": None}]}


@pytest.fixture
def saying() -> Iterator[Callable[[bytes], str]]:
    """saying(answer): the address of somebody who answers the first request with these bytes, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer(data: bytes) -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(data)

        def start(data: bytes) -> str:
            threading.Thread(target=answer, args=(data,), daemon=True).start()
            return f"http://127.0.0.1:{listening.getsockname()[1]}"

        yield start


def events(*lines: str, status: str = "200 OK") -> bytes:
    body = "".join(f"{line}\n\n" for line in lines)
    return f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n{body}".encode()


def test_an_answer_is_printed_behind_its_prompt(
    server: Running, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        client.completions.create(model="stories", prompt=PROMPT, max_tokens=8, temperature=0)
        .choices[0]
        .text
    )
    assert (
        small.main([PROMPT, "--max-tokens", "8", "--temperature", "0", "--url", server.url + "/"])
        == 0
    )
    told = capsys.readouterr()
    assert told.out == f"{PROMPT}{text}\n"
    assert told.err.startswith("[8 tokens in ") and told.err.endswith(" finish reason length]\n")


def test_the_events_are_those_of_the_server(saying: Callable[[bytes], str]) -> None:
    url = saying(
        events(
            ": a comment",
            f"data: {json.dumps(CHUNK)}",
            f"data: {json.dumps(CHUNK)}",
            "data: [DONE]",
        )
    )
    assert list(small.stream(url, {"prompt": PROMPT})) == [CHUNK, CHUNK]


@pytest.mark.parametrize(
    "answer, words",
    [
        (
            events('{"error": {"message": "too late"}}', status="504 Gateway Timeout"),
            "The server answered 504: too late",
        ),
        (
            events("<h1>Bad gateway</h1>", status="502 Bad Gateway"),
            "The server answered 502: <h1>Bad gateway</h1>",
        ),
        (
            events(
                f"data: {json.dumps(CHUNK)}",
                'data: {"error": {"message": "it broke"}}',
                "data: [DONE]",
            ),
            "with an error: it broke",
        ),
        (events(f"data: {json.dumps(CHUNK)}"), "stopped before its end"),
        (events("<html>a page</html>"), "stopped before its end"),
        (events("data: not JSON", "data: [DONE]"), "did not answer with a completion"),
        (b"220 mail.example ESMTP\r\n", "cannot be reached"),
        (b"", "cannot be reached"),
    ],
)
def test_whatever_a_server_does_is_said_in_a_sentence(
    saying: Callable[[bytes], str], answer: bytes, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        list(small.stream(saying(answer), {"prompt": PROMPT}))


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1:1", "127.0.0.1", "ftp://127.0.0.1", "http://[", "http://127.0.0.1:99999999"],
)
def test_an_address_where_nobody_is(address: str) -> None:
    with pytest.raises(UserError, match="--url"):
        list(small.stream(address, {"prompt": PROMPT}))


def test_a_key_is_sent(house: House, tiny_folder: Path) -> None:
    locked = house("--model", str(tiny_folder), "--kv-memory", "64KiB", "--api-key", "first-key")
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    assert (
        list(small.stream(locked.url, body, "first-key"))[-1]["choices"][0]["finish_reason"]
        == "length"
    )
    with pytest.raises(UserError, match="answered 401: The API key is missing or wrong"):
        list(small.stream(locked.url, body, "wrong"))
