"""Bad requests: a few in every run, thousands when asked for; and the soak, which is the same thing with patience."""

from __future__ import annotations

import json

import pytest

from stage06_serving import fuzz, soak

GOOD_ERROR = json.dumps(
    {"error": {"message": "a", "type": "b", "param": None, "code": 400}}
).encode()
STREAM = "text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    "status, kind, content, seconds, problem",
    [
        (200, "application/json", b"{}", 0.1, None),
        (400, "application/json", GOOD_ERROR, 0.1, None),
        (200, STREAM, b'data: {"a": 1}\n\ndata: [DONE]\n\n', 0.1, None),
        (500, "application/json", GOOD_ERROR, 0.1, "status 500"),
        (503, "application/json", GOOD_ERROR, 0.1, "status 503"),
        (200, "application/json", b"{}", 5.1, "no answer within 5 s"),
        (0, "", b"", 0.1, "no answer within 5 s"),
        (422, "application/json", b'{"detail": []}', 0.1, "status 422 without an error object"),
        (400, "text/plain", b"Bad Request", 0.1, "status 400 without an error object"),
        (404, "application/json", GOOD_ERROR, 0.1, "status 404 with the code 400 in its error object"),
        (
            400,
            "application/json",
            GOOD_ERROR + b" " * 2048,
            0.1,
            f"an error of {len(GOOD_ERROR) + 2048} bytes",
        ),
        (200, STREAM, b'data: {"a": 1}\n\n', 0.1, "a stream without its end"),
        (200, STREAM, b'data: {"error":{}}\n\ndata: [DONE]\n\n', 0.1, "a stream with an error"),
    ],
)
def test_what_is_a_problem(status, kind, content, seconds, problem):
    assert fuzz.problem_of(status, kind, content, seconds) == problem


def test_the_bodies_are_many_and_always_the_same():
    found = list(fuzz.bodies(500, 1))
    assert found == list(fuzz.bodies(500, 1)) != list(fuzz.bodies(500, 2))
    assert len({content for _, content in found}) > 400 and {path for path, _ in found} == {
        path for path, _ in fuzz.GOOD
    }

    def reads(content):
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            return None

    read = [body for body in (reads(content) for _, content in found) if isinstance(body, dict)]
    assert 100 < len(read) < 400  # some are for the parser, and some for what comes behind it
    limits = [body.get(name) for body in read for name in ("max_tokens", "max_completion_tokens")]
    assert not [limit for limit in limits if type(limit) is int and limit > fuzz.SHORT]


def test_a_few_bad_requests(server, monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "PATIENCE", 60.0)  # the machine may have other work
    assert fuzz.main(["--url", server.url, "--examples", "2", "--bodies", "60"]) == 0, (
        capsys.readouterr().out
    )
    told = capsys.readouterr().out
    assert "POST /v1/chat/completions" in told and told.endswith("0 problems\n")


@pytest.mark.slow
def test_many_bad_requests(capsys):
    assert fuzz.main(["--examples", "200", "--bodies", "2000"]) == 0, capsys.readouterr().out


def test_what_must_have_come_back():
    before = soak.State(memory=500 * 2**20, tasks=3, files=20, blocks=0.0)

    def bad(after=before, rates=(100.0, 99.0), window=60.0, refused=0):
        return [
            check.what
            for check in soak.judge(before, after, list(rates), window, refused)
            if not check.good
        ]

    def state(**changed):
        return soak.State(**{**vars(before), **changed})

    assert bad() == bad(state(memory=519 * 2**20, tasks=2, files=19)) == []
    assert bad(state(memory=521 * 2**20)) == ["memory, MiB"]
    assert bad(state(tasks=4)) == ["tasks"]
    assert bad(state(files=21)) == ["open files"]
    assert bad(state(blocks=0.01)) == ["blocks owned"]
    assert bad(refused=1) == ["refused requests"]
    assert bad(rates=(100.0, 94.0)) == ["tokens/s, first and last window"]
    assert bad(rates=(100.0, 50.0), window=2.0) == []  # too short to judge by


@pytest.mark.slow
def test_a_short_soak(capsys):
    assert soak.main(["--minutes", "0.34"]) == 0, capsys.readouterr().out
