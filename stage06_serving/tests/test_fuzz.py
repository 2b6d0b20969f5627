"""Bad requests: a few in every run, thousands on request; and the soak, the same for longer."""

from __future__ import annotations

import json

import pytest

from stage06_serving import fuzz, soak

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


@pytest.mark.slow
def test_many_bad_requests(capsys):
    assert fuzz.main(["--examples", "200", "--bodies", "2000"]) == 0, capsys.readouterr().out


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
def test_a_short_soak(capsys):
    assert soak.main(["--minutes", "0.34"]) == 0, capsys.readouterr().out
