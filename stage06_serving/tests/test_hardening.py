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

import h11
import httpx2
import pytest
from fastapi import FastAPI

from shared.errors import UserError
from stage06_serving import __main__ as program
from stage06_serving import connection, guard
from stage06_serving.benchmark import listening
from stage06_serving.guard import Guard
from stage06_serving.logs import Sparing
from stage06_serving.settings import PREFIX, parse
from stage06_serving.tests.asking import connected, exchange, get, post
from stage06_serving.tests.conftest import serving
from stage06_serving.tests.faulty_server import FILES, MODULE
from stage06_serving.tests.tools import HANG

KEY = "a key from a file"
BEARER = {"Authorization": f"Bearer {KEY}"}


def status_of(answer):
    return int(answer.split(b" ")[1])


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


@pytest.mark.parametrize("key", ["wrong", "first-key"])
def test_a_body_in_tiny_chunks_is_not_read_to_its_end(locked, key):
    """2.3 MB of them kept the event loop busy for 18 seconds, with a wrong key too."""
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = exchange(locked, head.encode() + b"1\r\na\r\n" * 400_000)
    assert status_of(answer) == 413 or (status_of(answer), key) == (401, "wrong")
    assert answer.count(b"HTTP/1.1") == 1 and b'"error"' in answer and b"nosniff" in answer


def test_the_rest_of_a_refused_body_is_not_awaited(locked):
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n"
    with connected(locked, head) as client:
        assert status_of(client.recv(2**16)) == 401
        with contextlib.suppress(ConnectionError):
            client.sendall(b"a" * 1000)
            while client.recv(2**16):  # until the server closes
                pass


def test_no_more_chunks_are_parsed_than_allowed():
    reader = connection.Reader()
    reader.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    reader.receive_data(b"1\r\na\r\n" * 10_000)
    assert isinstance(reader.next_event(), h11.Request)
    for _ in range(connection.MOST_CHUNKS):
        assert isinstance(reader.next_event(), h11.Data)
    with pytest.raises(h11.RemoteProtocolError):
        reader.next_event()


@pytest.mark.parametrize("one", [True, False], ids=["one header", "many"])
@pytest.mark.parametrize(
    ("size", "status"), [(16_384, 200), (16_385, 431), (54_000, 431), (300_000, 431)]
)
def test_headers_over_their_limit_are_refused(server, one, size, status):
    """All of them arrive at once: 54 KB passed."""
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    room = size - len(head) - 2
    filling = b"X: " + b"a" * (room - 5) + b"\r\n"
    if not one:
        many = b"X-1: abc\r\n" * (room // 10 - 1)
        filling = many + b"X: " + b"a" * (room - len(many) - 5) + b"\r\n"
    assert len(head + filling) + 2 == size
    assert status_of(exchange(server, head + filling + b"\r\n")) == status


def test_requests_that_are_sent_too_early_are_bounded(server):
    """A second request with more headers than allowed hides behind the first."""
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = exchange(server, first + first[:-2] + b"X: " + b"a" * 60_000 + b"\r\n\r\n")
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
        assert post(hard, json=body, headers=BEARER).status_code == 200
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


GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_headers_and_bodies_have_a_time_limit(monkeypatch):
    """Before the first request of a connection, and between two."""
    monkeypatch.setattr(connection, "SLOWEST_HEADERS", 0.3)
    monkeypatch.setattr(guard, "SLOWEST_BODY", 0.3)
    slow = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with beside() as (connect, begun):
        silent, _ = await connect()
        half, _ = await connect(GET[:20])
        body, _ = await connect(slow + b"Content-Length: 9\r\n\r\n{")
        second, writer = await connect(GET % b"/")
        assert (await second.readuntil(b'"well"')).startswith(b"HTTP/1.1 200")
        writer.write(GET[:20])
        assert await silent.read() == b""  # until the server closes
        for reader in (half, second, body):
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408") and b"RequestTimeoutError" in answer


async def test_the_connection_that_waits_longest_makes_room(monkeypatch):
    """Requests that are being answered are not interrupted."""
    monkeypatch.setattr(program, "most_connections", lambda: 2)
    async with beside() as (connect, begun):
        oldest, _ = await connect(GET[:20])
        busy, _ = await connect(GET % b"/wait")
        await begun.wait()
        third, writer = await connect(GET % b"/")
        assert await third.readuntil(b'"well"')
        assert await oldest.read() == b""
        writer.write(GET % b"/wait")  # now both are busy
        begun.clear()
        await begun.wait()
        refused, _ = await connect(GET % b"/")
        answer = await refused.read()
        assert answer.startswith(b"HTTP/1.1 503") and b"too many connections" in answer
        assert not busy.at_eof() and not third.at_eof()


# ---- pages of other sites -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "LOCALHOST.:8000", "a.localhost", "127.0.0.1:80")),
        *((host, 200) for host in ("[::1]:80", "192.168.1.5", "inner.example:9", "OTHER")),
        *((host, 403) for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io")),
        *((host, 403) for host in ("", "localhost@evil", "inner.example.evil", "x:y", "[evil]")),
    ],
)
def test_only_a_host_of_the_server_is_served(hard, host, status):
    """DNS rebinding: the name of another site stands for 127.0.0.1, and its page reads answers."""
    head = f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    answer = exchange(hard, head.encode())
    assert status_of(answer) == status and (status == 200 or b"--allowed-host" in answer)


def test_any_host_is_served_on_request():
    assert parse(["--host", "a", "--allowed-host", " b ,*"]).hosts == ["a", "b", "*"]
    assert Guard(FastAPI(), hosts=["*"])._serves("anything.example")
    assert not Guard(FastAPI(), hosts=["a"])._serves("b")


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
    named = {"X-Request-Id": "mine-2", **BEARER}
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
        text = get(hard, "/metrics", headers=BEARER).text
        found = re.findall(r'^staircase:http_responses_total{status="(\d+)"} (\S+)$', text, re.M)
        return Counter({int(status): float(count) for status, count in found})

    get(hard, "/v1/models"), get(hard, "/nothing", headers=BEARER)
    before = counts()
    for path, headers in (("/v1/models", {}), ("/nothing", BEARER), ("/v1/models", BEARER)):
        get(hard, path, headers=headers)
    exchange(hard, b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n")
    head = f"POST /generate HTTP/1.1\r\nHost: a.localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    exchange(hard, head.encode() + b"1\r\na\r\n" * 1000)  # refused by the connection, too
    assert counts() - before == {200: 2, 401: 1, 404: 1, 413: 1, 431: 1}


def test_keys_are_not_for_the_list_of_processes(hard, tmp_path, capsys, monkeypatch):
    assert get(hard, "/v1/models", headers=BEARER).status_code == 200
    answer = get(hard, "/v1/models", headers={"Authorization": "Bearer keys"})
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
    full, head = get(server, path), httpx2.head(server.url + path, trust_env=False, timeout=60)
    assert head.status_code == full.status_code == 200 and head.content == b""
    assert head.headers["content-length"] == str(len(full.content))


def test_a_flood_of_trouble_is_a_line_a_second(server, caplog):
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
