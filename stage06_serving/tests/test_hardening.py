"""A busy port and hostile neighbours: floods, clients that never finish, pages of other sites; and
what an operator needs. Real servers and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from contextlib import ExitStack

import pytest
from fastapi import FastAPI

from shared.errors import UserError
from stage06_serving import __main__ as program
from stage06_serving import connection, guard
from stage06_serving.guard import Guard
from stage06_serving.inside import listening
from stage06_serving.logs import Sparing
from stage06_serving.settings import PREFIX, parse

from .asking import (
    HANG,
    JSON,
    ask,
    bearer,
    connected,
    exchange,
    get,
    post,
    read_metrics,
    status_of,
    written,
)
from .conftest import serving
from .faulty_server import FILES, MODULE

KEY = "a key from a file"
CHUNKED, CLOSE = "Transfer-Encoding: chunked", "Connection: close"


@pytest.fixture(scope="module")
def hard(tiny_folder, tmp_path_factory):
    """A server with few descriptors, another name, keys in a file, and requests in its log."""
    pytest.importorskip("resource")
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"another\n{KEY}\n", encoding="utf-8")
    options = ["--allowed-host", "inner.example, other", "--api-key-file", str(file)]
    options += ["--model", str(tiny_folder), "--kv-memory", "64KiB", "--log-requests"]
    with serving(*options, env={FILES: "256"}, module=MODULE) as running:
        yield running


# ---- floods -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "chunks", "statuses"),
    [
        *((key, 400_000, (413, 401)[: 1 + (key == "wrong")]) for key in ("wrong", "first-key")),
        ("first-key", connection.MOST_CHUNKS + 1, (413,)),
        ("first-key", connection.MOST_CHUNKS, (400,)),  # not JSON
    ],
)
def test_a_body_in_tiny_chunks_is_not_read_to_its_end(locked, key, chunks, statuses):
    """2.3 MB of them kept the event loop busy for 18 seconds, with a wrong key too."""
    headers = (JSON, f"Authorization: Bearer {key}", CHUNKED, CLOSE)
    head = written("/generate", *headers, method="POST")
    answer = exchange(locked, head + b"1\r\na\r\n" * chunks + b"0\r\n\r\n")
    assert status_of(answer) in statuses and answer.count(b"HTTP/1.1") == 1
    assert b'"error"' in answer and b"nosniff" in answer


def test_the_rest_of_a_refused_body_is_not_awaited(locked):
    head = written("/generate", "Content-Length: 900000", method="POST")
    with connected(locked, head) as client:
        assert status_of(client.recv(2**16)) == 401
        with contextlib.suppress(ConnectionError):
            client.sendall(b"a" * 1000)
            while client.recv(2**16):  # until the server closes
                pass


@pytest.mark.parametrize("one", [True, False], ids=["one header", "many"])
@pytest.mark.parametrize(
    ("size", "status"), [(16_384, 200), (16_385, 431), (54_000, 431), (300_000, 431)]
)
def test_headers_over_their_limit_are_refused(server, one, size, status):
    """All of them arrive at once: 54 KB passed."""
    many = [] if one else ["X-1: abc"] * ((size - 100) // 10)
    room = size - len(written("/health", CLOSE, *many, "X: "))
    assert (
        status_of(exchange(server, written("/health", CLOSE, *many, "X: " + "a" * room))) == status
    )


def test_requests_that_are_sent_too_early_are_bounded(server):
    """A second request with more headers than allowed hides behind the first."""
    early = written("/health") + written("/health", "X: " + "a" * 60_000)
    answer = exchange(server, early)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1 200") == 1


def test_idle_connections_leave_room_for_others(hard):
    """300 of them with 256 descriptors: /health was dead, and the log grew by 146,000 lines."""
    before = len(hard.stderr().splitlines())
    with ExitStack() as stack:
        for number in range(300):
            data = b"GET /health HTTP/1.1\r\nHost: " if number % 2 else b""
            stack.enter_context(connected(hard, data))
        for _ in range(3):
            assert get(hard, "/health").json() == {"status": "ok"}
        body = {"prompt": [5], "max_tokens": 2}
        assert post(hard, json=body, headers=bearer(KEY)).status_code == 200
    assert len(hard.stderr().splitlines()) - before < 12 and "Traceback" not in hard.stderr()


def test_the_limit_of_descriptors_is_raised_if_it_may_be(monkeypatch):
    resource = pytest.importorskip("resource")
    limits: dict[str, int] = {}
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.update(soft=pair[0]))
    infinite = resource.RLIM_INFINITY
    for soft, hard, raised, most in (
        (256, 256, None, 128),
        (256, 1000, 1000, 872),
        (1024, infinite, 4224, 4096),
        (2**20, 2**20, None, 4096),
        (infinite, infinite, None, 4096),
    ):
        limits.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda which, pair=(soft, hard): pair)
        assert connection.most_connections() == most and limits.get("soft") == raised


# ---- clients that never finish ------------------------------------------------------------------


@contextlib.asynccontextmanager
async def beside():
    """(connect, begun) of a real server in this process; a request to /wait sets `begun`."""
    app, begun, over = FastAPI(), asyncio.Event(), asyncio.Event()
    app.add_middleware(Guard)

    @app.get("/")
    async def root() -> str:
        return "well"

    @app.get("/wait")
    async def wait() -> None:
        begun.set()
        await over.wait()

    async with asyncio.timeout(HANG), listening(app) as url, contextlib.AsyncExitStack() as stack:

        async def connect(data=b""):
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(data)
            return reader, writer

        stack.callback(over.set)
        yield connect, begun


async def test_headers_and_bodies_have_a_time_limit(monkeypatch):
    """Before the first request of a connection, and between two."""
    monkeypatch.setattr(connection, "SLOWEST_HEADERS", 0.3)
    monkeypatch.setattr(guard, "SLOWEST_BODY", 0.3)
    async with beside() as (connect, begun):
        silent, _ = await connect()
        half, _ = await connect(written("/")[:20])
        body, _ = await connect(written("/", JSON, "Content-Length: 9", method="POST") + b"{")
        second, writer = await connect(written("/"))
        assert (await second.readuntil(b'"well"')).startswith(b"HTTP/1.1 200")
        writer.write(written("/")[:20])
        assert await silent.read() == b""  # until the server closes
        for reader in (half, second, body):
            answer = await reader.read()
            assert status_of(answer) == 408 and b"RequestTimeoutError" in answer


async def test_the_connection_that_waits_longest_makes_room(monkeypatch):
    """Requests that are being answered are not interrupted."""
    monkeypatch.setattr(program, "most_connections", lambda: 2)
    async with beside() as (connect, begun):
        oldest, _ = await connect(written("/")[:20])
        busy, _ = await connect(written("/wait"))
        await begun.wait()
        third, writer = await connect(written("/"))
        assert await third.readuntil(b'"well"')
        assert await oldest.read() == b""
        writer.write(written("/wait"))  # now both are busy
        begun.clear()
        await begun.wait()
        refused, _ = await connect(written("/"))
        answer = await refused.read()
        assert status_of(answer) == 503 and b"too many connections" in answer
        assert not busy.at_eof() and not third.at_eof()


# ---- pages of other sites -----------------------------------------------------------------------


def test_only_a_host_of_the_server_is_served(hard):
    """DNS rebinding: the name of another site stands for 127.0.0.1, and its page reads answers."""
    good = "localhost LOCALHOST.:8000 a.localhost 127.0.0.1:80 [::1]:80 192.168.1.5 OTHER"
    bad = "evil.example localhost.evil.example 127.0.0.1.nip.io localhost@evil x:y [evil]"
    hosts = dict.fromkeys([*good.split(), "inner.example:9"], 200)
    for host, status in (
        hosts | dict.fromkeys([*bad.split(), "", "inner.example.evil"], 403)
    ).items():
        answer = exchange(hard, written("/health", CLOSE, host=host))
        assert status_of(answer) == status and (status == 200 or b"--allowed-host" in answer), host
    assert parse(["--host", "a", "--allowed-host", " b ,*"]).hosts == ["a", "b", "*"]
    assert Guard(FastAPI(), hosts=["*"])._serves("anything.example")


def test_a_page_of_another_site_is_refused(server):
    for site, path, status in (
        ("cross-site", "/v1/models", 403),
        ("cross-site", "/health", 403),
        ("cross-site", "/", 200),  # a link to the page
        ("same-origin", "/v1/models", 200),
        ("none", "/health", 200),
    ):
        answer = get(server, path, headers={"Sec-Fetch-Site": site})
        assert answer.status_code == status
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"


# ---- operation ----------------------------------------------------------------------------------


def test_requests_have_names_that_the_log_shows(hard):
    assert get(hard, "/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"]
    named = {"X-Request-Id": "mine-2", **bearer(KEY)}
    assert get(hard, "/v1/models", headers=named).headers["x-request-id"] == "mine-2"
    assert get(hard, "/nowhere%0aand", headers=named).status_code == 404
    own = {
        get(hard, "/health", headers=sent).headers["x-request-id"]
        for sent in ({}, {}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 129})
    }
    assert len(own) == 4 and all(re.fullmatch("[0-9a-f]{32}", name) for name in own)
    lines = [line for line in hard.stderr().splitlines() if "staircase.requests" in line]
    assert any(re.search(r"mine-1 127.0.0.1 GET '/health' 200 \d+\.\d{3} s$", one) for one in lines)
    assert any(r"mine-2 127.0.0.1 GET '/nowhere\nand' 404" in line for line in lines)


def test_answers_are_counted_by_status(hard):
    def counts():
        name = 'staircase:http_responses_total{status="%d"}'
        found = read_metrics(hard, KEY)
        return Counter(
            {status: found.get(name % status, 0) for status in (200, 401, 404, 413, 431)}
        )

    before = counts()
    for path, headers in (("/v1/models", {}), ("/nothing", bearer(KEY)), ("/", {})):
        get(hard, path, headers=headers)
    exchange(hard, written("/", "X: " + "a" * 20_000))
    lines = (JSON, f"Authorization: Bearer {KEY}", CHUNKED)
    head = written("/generate", *lines, method="POST", host="a.localhost")
    exchange(hard, head + b"1\r\na\r\n" * 1000)  # refused by the connection, too
    assert counts() - before == {200: 2, 401: 1, 404: 1, 413: 1, 431: 1}


def test_keys_are_not_for_the_list_of_processes(hard, tmp_path, capsys, monkeypatch):
    assert get(hard, "/v1/models", headers=bearer(KEY)).status_code == 200
    answer = get(hard, "/v1/models", headers=bearer("keys"))
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    file = tmp_path / "keys"
    for content in (None, "", " \n"):  # without a key the server would be open
        if content is not None:
            file.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="--api-key-file"):
            parse(["--api-key-file", str(file)])
    assert "list of its processes" not in capsys.readouterr().err
    assert parse(["--api-key", "secret"]).keys == ["secret"]
    shown = capsys.readouterr().err
    assert "list of its processes" in shown and "secret" not in shown
    monkeypatch.setenv(f"{PREFIX}API_KEY", "secret")
    assert parse([]).keys == ["secret"] and not capsys.readouterr().err


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version"])
def test_pages_and_health_answer_head(server, path):
    full, head = get(server, path), ask(server, "HEAD", path)
    assert head.status_code == full.status_code == 200 and head.content == b""
    assert head.headers["content-length"] == str(len(full.content))


def test_a_flood_of_trouble_is_a_line_a_second(server):
    """The log of the server, and the filter by itself."""
    before, started = len(server.stderr().splitlines()), time.monotonic()
    for _ in range(50):
        exchange(server, b"NOT HTTP\r\n\r\n")
    lines = len(server.stderr().splitlines()) - before
    assert 1 <= lines <= 2 + time.monotonic() - started
    sparing = Sparing()
    records = [logging.LogRecord("a", logging.ERROR, "", 1, "failed", (), None) for _ in range(9)]
    assert [sparing.filter(record) for record in records] == [True, *[False] * 8]
    other = logging.LogRecord("a", logging.ERROR, "", 1, "another", (), None)
    assert sparing.filter(other) and other.msg == "another"
    sparing.last.clear()
    assert sparing.filter(records[1]) and records[1].msg == "failed (and 8 more of this kind)"
