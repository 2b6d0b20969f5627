"""The programs beside the server. The small client: its output, and one sentence for each failure
of a server. The fuzzer: a few bad requests in every run, thousands on request. The soak, too.
"""

from __future__ import annotations

import json
import socket
import threading

import pytest

from shared.errors import UserError
from stage06_serving import client as small

from . import fuzz, soak
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


ERROR = json.dumps({"error": {"message": "a", "type": "b", "param": None, "code": 400}}).encode()
PLAIN, STREAM = "application/json", "text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    "status, kind, content, seconds, problem",
    [
        (400, PLAIN, ERROR, 0.1, None),
        (200, STREAM, b'data: {"a": 1}\n\ndata: [DONE]\n\n', 0.1, None),
        (500, PLAIN, ERROR, 0.1, "status 500"),
        (0, "", b"", 0.1, "no answer within 5 s"),
        (422, PLAIN, b'{"detail": []}', 0.1, "status 422 without an error object"),
        (404, PLAIN, ERROR, 0.1, "status 404 with the code 400 in its error object"),
        (400, PLAIN, ERROR + b" " * 2048, 0.1, f"an error of {len(ERROR) + 2048} bytes"),
        (200, STREAM, b'data: {"a": 1}\n\n', 0.1, "a stream without its end"),
        (200, STREAM, b'data: {"error":{}}\n\ndata: [DONE]\n\n', 0.1, "a stream with an error"),
    ],
)
def test_problems(status, kind, content, seconds, problem):
    assert fuzz.problem_of(status, kind, content, seconds) == problem


def test_a_few_bad_requests(server, monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "PATIENCE", 60.0)  # the machine may be busy
    status = fuzz.main(["--url", server.url, "--examples", "2", "--bodies", "60"])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "POST /v1/chat/completions" in shown and shown.endswith("0 problems\n")


BEFORE = {"memory": 500 * 2**20, "tasks": 3, "files": 20, "blocks": 0.0}


@pytest.mark.parametrize(
    ("after", "rates", "window", "refused", "bad"),
    [
        ({"memory": 519 * 2**20, "tasks": 2, "files": 19}, (100.0, 99.0), 60.0, 0, []),
        ({"memory": 521 * 2**20, "tasks": 4}, (100.0, 99.0), 60.0, 0, ["memory, MiB", "tasks"]),
        ({"files": 21, "blocks": 0.01}, (100.0, 99.0), 60.0, 0, ["open files", "blocks owned"]),
        ({}, (100.0, 94.0), 60.0, 1, ["refused requests", "tokens/s, first and last window"]),
        ({}, (100.0, 50.0), 2.0, 0, []),  # too short to judge by
    ],
)
def test_what_a_soak_must_leave_as_it_was(after, rates, window, refused, bad):
    states = soak.State(**BEFORE), soak.State(**BEFORE | after)  # type: ignore[arg-type]
    checks = soak.judge(*states, list(rates), window, refused)
    assert [check.what for check in checks if not check.good] == bad


@pytest.mark.slow
def test_many_bad_requests_and_a_short_soak(capsys):
    assert fuzz.main(["--examples", "200", "--bodies", "2000"]) == 0, capsys.readouterr().out
    assert soak.main(["--minutes", "0.34"]) == 0, capsys.readouterr().out
