"""The small client: its output, and one sentence for each failure of a server."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from shared.errors import UserError
from stage06_serving import client as small

from .asking import PROMPT, first

CHUNK = {"choices": [{"index": 0, "text": " a", "finish_reason": None}]}
DATA = f"data: {json.dumps(CHUNK)}"
BROKEN = 'data: {"error": {"message": "it broke"}}'


@pytest.fixture
def answering():
    """answering(answer): an address that answers one request with these bytes, then closes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer(data):
            connection, _ = listening.accept()
            with connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(2**16):  # closing with unread bytes would reset
                    pass

        def start(data):
            threading.Thread(target=answer, args=(data,), daemon=True).start()
            return f"http://127.0.0.1:{listening.getsockname()[1]}"

        yield start


def stream(*lines: str, status: str = "200 OK") -> bytes:
    body = "".join(f"{line}\n\n" for line in lines)
    head = "Content-Type: text/event-stream\r\nConnection: close"
    return f"HTTP/1.1 {status}\r\n{head}\r\n\r\n{body}".encode()


def test_an_answer_is_printed_after_its_prompt(server, client, capsys):
    options = ["--max-tokens", "8", "--temperature", "0", "--url", server.url + "/"]
    assert small.main([PROMPT, *options]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{PROMPT}{first(client).text}\n"
    assert printed.err.startswith("[8 tokens in ")
    assert printed.err.endswith(" finish reason length]\n")


def test_an_answer_that_ends_early_has_its_summary(capsys, monkeypatch):
    chunk = CHUNK | {"usage": {"completion_tokens": 1}}
    for error, reason in ((KeyboardInterrupt(), "interrupted"), (UserError("it broke"), "None")):

        def ends(*asked, error=error):
            yield chunk
            raise error

        monkeypatch.setattr(small, "stream", ends)
        with pytest.raises(type(error)):
            small.main([PROMPT])
        out, err = capsys.readouterr()
        assert out == f"{PROMPT} a\n" and err.startswith("[1 tokens in ")
        assert err.endswith(f"finish reason {reason}]\n")


LATE = stream('{"error": {"message": "too late"}}', status="504 Gateway Timeout")
GATEWAY = stream("<h1>Bad gateway</h1>", status="502 Bad Gateway")


@pytest.mark.parametrize(
    "answer, words",
    [
        (LATE, "The server answered 504: too late"),
        (GATEWAY, "The server answered 502: <h1>Bad gateway</h1>"),
        (stream(DATA, BROKEN, "data: [DONE]"), "with an error: it broke"),
        (stream(DATA), "stopped before its end"),
        (stream("<html>a page</html>"), "stopped before its end"),
        (stream("data: not JSON", "data: [DONE]"), "did not answer with a completion"),
        (b"220 mail.example ESMTP\r\n", "cannot be reached"),
        (b"", "cannot be reached"),
    ],
)
def test_every_failure_is_a_sentence(answering, answer, words):
    url = answering(stream(": a comment", DATA, DATA, "data: [DONE]"))
    assert list(small.stream(url, {"prompt": PROMPT})) == [CHUNK, CHUNK]
    with pytest.raises(UserError, match=words):
        list(small.stream(answering(answer), {"prompt": PROMPT}))


def test_an_address_without_a_server_and_a_key(locked):
    for address in ("http://127.0.0.1", "127.0.0.1", "ftp://127.0.0.1", "http://["):
        for port in (":1", ":99999999"):
            with pytest.raises(UserError, match="--url"):
                list(small.stream(address + port, {"prompt": PROMPT}))
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    *_, last = small.stream(locked.url, body, "first-key")
    assert last["choices"][0]["finish_reason"] == "length"
    with pytest.raises(UserError, match="answered 401: The API key is missing or wrong"):
        list(small.stream(locked.url, body, "wrong"))
