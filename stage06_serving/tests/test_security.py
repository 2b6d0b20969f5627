"""A busy port and hostile neighbours. Mechanisms that brought servers down, by the number of their
report, floods, pages of other sites; and what an operator needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi import FastAPI

from shared.errors import UserError
from stage06_serving import __main__ as program
from stage06_serving import connection, logs
from stage06_serving.guard import LARGEST_BODY, Guard
from stage06_serving.logs import Queued, Sparing
from stage06_serving.settings import PREFIX, Settings, parse

from .asking import (
    JSON,
    LARGEST_ERROR,
    PROMPT,
    ask,
    bearer,
    connected,
    exchange,
    get,
    post,
    read_metrics,
    status_of,
    until,
    written,
)
from .conftest import FILE_KEY

WORD = "a-word-of-the-client"
BODY = b'{"prompt": "a", "max_tokens": 1}'
CHUNKED, CLOSE = "Transfer-Encoding: chunked", "Connection: close"
CHUNK = b"20\r\n" + BODY + b"\r\n"


def refused(answer, status=400):
    """The message of a refusal, which must be small and reveal nothing of the server's
    internals."""
    assert answer.status_code == status, answer.text[:500]
    assert len(answer.content) <= LARGEST_ERROR
    error = answer.json()["error"]
    assert error["code"] == status and error.keys() == {"message", "type", "param", "code"}
    inside = ("Traceback", ".py", "site-packages", str(Path.home()), str(Path.cwd()))
    assert not any(word in answer.text for word in inside)
    return error["message"]


def raw(server, content):
    """The answer to a body of JSON."""
    return post(server, content=content, headers=dict([JSON.split(": ")]))


def head(*lines, key="first-key"):
    """The head of a POST with a key."""
    key = f"Authorization: Bearer {key}"
    return written("/v1/completions", CLOSE, JSON, key, *lines, method="POST")


def chunks(count, key="first-key"):
    return head(CHUNKED, key=key) + b"1\r\na\r\n" * count + b"0\r\n\r\n"


def headers(size, lines):
    """A request whose headers have `size` bytes, most of them in one line or in many."""
    many = ["X-1: abc"] * ((size - 100) // 10) if lines == "many" else []
    room = size - len(written("/health", CLOSE, *many, "X: "))
    return written("/health", CLOSE, *many, "X: " + "a" * room)


# ---- bytes --------------------------------------------------------------------------------------

RAW: dict[str, tuple[bytes, int]] = {
    # CVE-2025-43859: if the server and the proxy before it disagree on the end of a body, the rest
    # becomes another request.
    "two lengths": (head("Content-Length: 32", "Content-Length: 5") + BODY, 400),
    "a negative length": (head("Content-Length: -5") + BODY, 400),
    "a list of lengths": (head("Content-Length: 32, 5") + BODY, 400),
    "two encodings": (head(f"{CHUNKED}, identity") + CHUNK + b"0\r\n\r\n", 400),
    "a chunk that goes on": (head(CHUNKED) + CHUNK[:-2] + b"XX0\r\n\r\n", 400),
    "a negative chunk": (head(CHUNKED) + b"-1\r\n" + BODY, 400),
    "a space in a name": (head("Content-Length : 32") + BODY, 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\nHost: localhost\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/2, as its clients begin": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00" + bytes(64), 400),
    "chunks and a length": (head(CHUNKED, "Content-Length: 4") + CHUNK + b"0\r\n\r\n", 400),
    "an encoding besides chunks": (head("Transfer-Encoding: gzip, chunked") + CHUNK, 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two hosts": (written("/health", "Host: other"), 400),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 400),
    "an upgrade": (written("/health", CLOSE, "Connection: upgrade", "Upgrade: h2c"), 200),
    "chunks in HTTP/1.0": (head(CHUNKED).replace(b"1.1", b"1.0") + CHUNK + b"0\r\n\r\n", 400),
    "an expectation in HTTP/1.0": (
        head("Content-Length: 32", "Expect: 100-continue").replace(b"1.1", b"1.0") + BODY,
        200,
    ),
    # 2.3 MB of chunks kept the event loop busy for 18 seconds.
    "a flood of chunks": (chunks(400_000), 413),
    "one chunk too many": (chunks(connection.MOST_CHUNKS + 1), 413),
    "the most chunks": (chunks(connection.MOST_CHUNKS), 400),  # not JSON
    # 16 KB of them kept the event loop busy for 10 ms, before the request was refused.
    "the most headers": (written("/health", CLOSE, *["a: b"] * 98), 200),
    "a header too many": (written("/health", CLOSE, *["a: b"] * 99), 431),
    "a flood of headers": (written("/health", CLOSE, *["a:"] * 4000), 431),
    "a flood of trailers": (head(CHUNKED) + CHUNK + b"0\r\n" + b"a:\r\n" * 4000, 431),
    "an endless trailer": (head(CHUNKED) + CHUNK + b"0\r\na: " + b"a" * 100_000, 431),
    "an endless extension": (head(CHUNKED) + b"20;a=" + b"a" * 100_000, 431),
    # All headers arrive at once: 54 KB passed.
    **{
        f"{size} bytes of headers, {lines}": (headers(size, lines), status)
        for size, status in ((16_384, 200), (16_385, 431), (54_000, 431), (300_000, 431))
        for lines in ("one", "many")
        if (size, lines) != (16_384, "many")
    },
    # The second request exceeds the limit on headers, and hides behind the first.
    "too early": (written("/health") + written("/health", "X: " + "a" * 60_000), 200),
    "behind chunks": (head(CHUNKED) + CHUNK + b"0\r\n\r\n" + written("/health"), 200),
}


@pytest.mark.parametrize(("data", "status"), RAW.values(), ids=RAW)
def test_bytes_are_answered_once_or_refused(locked, data, status):
    answer = exchange(locked, data)
    assert (answer.count(b"HTTP/1.1 "), status_of(answer)) == (1, status), answer
    assert status == 200 or (b'"error"' in answer and b"nosniff" in answer)


def test_the_rest_of_a_refused_body_is_not_kept_and_not_awaited(locked):
    before = psutil.Process(locked.process.pid).memory_info().rss
    many = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    assert exchange(locked, head(CHUNKED) + many * 500).startswith(b"HTTP/1.1 413")
    assert psutil.Process(locked.process.pid).memory_info().rss - before < 16 * 2**20
    assert status_of(exchange(locked, chunks(400_000, "wrong"))) in (401, 413)
    kept = written("/generate", "Content-Length: 900000", method="POST")  # not to be closed
    with connected(locked, kept) as client:
        assert status_of(client.recv(2**16)) == 401
        with contextlib.suppress(ConnectionError):
            client.sendall(b"a" * 1000)
            while client.recv(2**16):  # until the server closes
                pass


@pytest.mark.parametrize(
    "body",
    [
        *(b"a" * LARGEST_BODY, b"a" * (LARGEST_BODY + 1), b"[5]"),
        *(b"", b"{", b"null", b"[]", b"5", b'"a"', b"\xff\xfe", b"\x00", b'{"prompt": "a",}'),
        *(b'["x"' + b',"x"' * 200_000 + b"]", b'{"prompt": [true' + b",true" * 150_000 + b"]}"),
        b'{"prompt": "a", "logit_bias": {"' + "😀".encode() * 100_000 + b'": 1}}',
        *(rb'{"prompt": "a \ud83d b", "echo": true}', rb'{"prompt": "a", "n": "\ud83d"}'),
        *(b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000),
        b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "n": ' + b"9" * 500_000 + b"}",
        *(b'{"prompt": "a", "top_p": %s}' % number for number in (b"NaN", b"-Infinity", b"1e999")),
        *(b'{"prompt": "a\xff"}', b'{"prompt": "a", "logit_bias": {"5": 1e999}}'),
    ],
    ids=lambda body: repr(body[:40]),
)
def test_unreadable_bodies_are_refused(server, body):
    """With a small error: elsewhere, 4 kilobytes were answered with 23 megabytes."""
    message = refused(raw(server, body), 413 if len(body) > LARGEST_BODY else 400)
    assert body != b"[5]" or "not a JSON object" in message


def test_only_json_is_read_and_no_other_site_may_ask(server):
    """A page of another site may post a form or plain text to a local server without its
    consent."""
    form = "application/x-www-form-urlencoded"
    for kind in ("text/plain", form, "multipart/form-data; boundary=a", "application/jsonx", ""):
        refused(post(server, content=BODY, headers={"Content-Type": kind}))
    refused(post(server, content=BODY))
    origin = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "POST"}
    answer = get(server, "/v1/models", headers=origin)
    assert not any(name.startswith("access-control") for name in answer.headers)
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


# ---- keys and hosts -----------------------------------------------------------------------------

HOSTS = ("x/health?", "127.0.0.1/health#", "x/health/../", "", "a@b/?")
SPELLINGS = (
    *("//v1/models", "/health/../v1/models", "/health/..%2fv1/models", "/%2e/v1/models", "*"),
    *("/v1/models?/health", "/v1/models#/health", "/v1/models;/health", "/HEALTH", "/health/"),
    *("/%76%31/models", "http://x/health", "/health%00/v1/models", "/v1/models/"),
)
GOOD = "localhost LOCALHOST.:8000 a.localhost 127.0.0.1:80 [::1]:80 192.168.1.5 OTHER inner.example"
BAD = "evil.example localhost.evil.example 127.0.0.1.nip.io localhost@evil x:y [evil] inner.evil"


def asked(server, target, key="", method="GET", host="localhost"):
    """The answer to a request with this header "Authorization"."""
    lines = (CLOSE, f"Authorization: {key}")
    return exchange(server, written(target, *lines, method=method, host=host))


def test_only_a_host_of_the_server_is_served_and_no_spelling_opens_a_path(locked):
    """CVE-2026-48710, CVE-2026-48746 ("BadHost"): the path that was checked came from the host. DNS
    rebinding: the name of another site stands for 127.0.0.1, and its page reads answers."""
    for target, host in (
        *((path, host) for path in ("/v1/models", "/metrics", "/live") for host in HOSTS),
        *((target, "localhost") for target in SPELLINGS),
    ):
        answer = asked(locked, target, host=host)
        assert status_of(answer) in (400, 401, 403), (target, host)
    for host in (*GOOD.split(), *BAD.split(), ""):
        answer = asked(locked, "/health", host=host)
        status = 200 if host in GOOD.split() else 403
        assert status_of(answer) == status and (status == 200 or b"--allowed-host" in answer), host
    assert parse(["--host", "a", "--allowed-host", " b ,*"]).hosts == ["a", "b", "*"]
    assert Guard(FastAPI(), hosts=["*"])._serves("anything.example")


def test_a_key_opens_everything_and_nothing_else_does(locked):
    path, first = "/v1/models", "Bearer first-key"
    for right in (first, "bearer second-key", "BEARER zweiter-schlüssel", f"Bearer {FILE_KEY}"):
        assert status_of(asked(locked, path, right)) == 200
    wrong = ["", "Bearer", "Bearer ", f"{first},second-key", first[:-1], f"{first}x", f"{first} x"]
    for key in [*wrong, "Bearer \udcff", "first-key", "Basic first-key", "Bearer " + "x" * 8000]:
        assert status_of(asked(locked, path, key)) == 401
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
        assert status_of(asked(locked, "/v1/completions", method=method)) == 401
    answer = get(locked, path)
    assert "first-key" not in refused(answer, 401) + locked.stderr()
    assert answer.json()["error"]["type"] == "AuthenticationError"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_keys_are_compared_in_constant_time(monkeypatch):
    """CVE-2025-59425: `==` stops at the first letter that differs, so its time reveals where."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(*pair):
        compared.append(pair)
        return pair[0] == pair[1]

    monkeypatch.setattr(secrets, "compare_digest", compare)
    guard = Guard(FastAPI(), ("first", "second", "third"))
    for key, known in ((b"first", True), (b"third", True), (b"\xff" * 5000, False)):
        compared.clear()
        assert guard._known(key) is known
        digest = hashlib.sha256(key).digest()  # of one length, whatever was sent
        assert compared == [(digest, one) for one in guard.digests] and len(compared) == 3


def test_keys_do_not_share_a_prefix(locked):
    """CVE-2025-46570: the time to the first token showed whether another client had sent the same
    prompt."""
    found, body = [], {"prompt": list(range(40)), "max_tokens": 1}
    for key in ("first-key", "first-key", "second-key", "second-key"):
        assert post(locked, json=body, headers=bearer(key)).status_code == 200
        found.append(read_metrics(locked, key)["vllm:prefix_cache_hits_total"])
    assert [count - found[0] for count in found] == [0, 32, 32, 64]


def test_a_pipe_with_a_key_locks_the_server():
    """--api-key-file <(pass show key): it was read twice, and the second time it had no key."""
    read, write = os.pipe()
    os.write(write, b"secret\n")
    os.close(write)
    settings = parse(["--host", "0.0.0.0", "--api-key-file", f"/dev/fd/{read}"])
    assert settings.keys == settings.keys == ["secret"] and not settings.open_to_all
    os.close(read)


def test_keys_are_not_for_the_list_of_processes(tmp_path, capsys, monkeypatch):
    file = tmp_path / "keys"
    for content in (None, "", " \n"):  # without a key the server would be open
        if content is not None:
            file.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="--api-key-file"):
            parse(["--api-key-file", str(file)])
    with pytest.raises(UserError, match=r"--api-key-file: .* cannot be read \(it is over 1 MiB\)"):
        parse(["--api-key-file", "/dev/zero"])
    for nothing in (", ,", "\n"):
        with pytest.raises(UserError, match="--api-key: it has no key"):
            parse(["--api-key", nothing])
    assert "process list" not in capsys.readouterr().err
    assert parse(["--api-key", "secret"]).keys == ["secret"]
    shown = capsys.readouterr().err
    assert "process list" in shown and "secret" not in shown
    monkeypatch.setenv(f"{PREFIX}API_KEY", "secret")
    assert parse([]).keys == ["secret"] and not capsys.readouterr().err


# ---- programs and processes ---------------------------------------------------------------------


def test_no_program_that_comes_with_a_model_is_run(tiny_folder, tmp_path):
    """CVE-2026-22807: its config named a Python file. CVE-2025-32434, CVE-2026-24747,
    CVE-2025-24357: weights in a pickle are a program."""
    folder, opened = shutil.copytree(tiny_folder, tmp_path / "model"), tmp_path / "opened"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "code.py").write_text(f"open({str(opened)!r}, 'w')", encoding="utf-8")
    pickled = f"cbuiltins\nopen\n(V{opened}\nVw\ntR.".encode()  # opens the file when it is read
    settings = Settings(model=str(folder), kv_memory="1MiB", linear="plain")
    program.make_engine(settings)
    for name in ("model.safetensors", "pytorch_model.bin", "model.pt"):
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / name).write_bytes(pickled)
        with pytest.raises(UserError, match="safetensors"):
            program.make_engine(settings)
    assert not opened.exists()


def test_one_process_listens_on_one_address(locked):
    """CVE-2025-47277, CVE-2025-32444, CVE-2025-30165, CVE-2026-3059: processes took pickles from
    any machine."""
    process = psutil.Process(locked.process.pid)
    assert not process.children(recursive=True)
    connections = process.net_connections(kind="all")
    listening = {tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}
    assert listening == {("127.0.0.1", locked.port)}


def test_idle_connections_leave_room_for_others(locked):
    """300 of them with 256 descriptors: /health was dead, and the log grew by 146,000 lines."""
    pytest.importorskip("resource")
    before = len(locked.stderr().splitlines())
    with ExitStack() as stack:
        for number in range(300):
            data = b"GET /health HTTP/1.1\r\nHost: " if number % 2 else b""
            stack.enter_context(connected(locked, data))
        for _ in range(3):
            assert get(locked, "/health").json() == {"status": "ok"}
        body = {"prompt": [5], "max_tokens": 2}
        assert post(locked, json=body, headers=bearer(FILE_KEY)).status_code == 200
    assert len(locked.stderr().splitlines()) - before < 12 and "Traceback" not in locked.stderr()


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


# ---- the log and the counters -------------------------------------------------------------------


def test_requests_have_names_that_the_log_shows(locked):
    assert get(locked, "/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"]
    named = {"X-Request-Id": "mine-2", **bearer(FILE_KEY)}
    assert get(locked, "/v1/models", headers=named).headers["x-request-id"] == "mine-2"
    assert get(locked, "/nowhere%0aand", headers=named).status_code == 404
    own = {
        get(locked, "/health", headers=sent).headers["x-request-id"]
        for sent in ({}, {}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 129})
    }
    assert len(own) == 4 and all(re.fullmatch("[0-9a-f]{32}", name) for name in own)
    form = r"staircase.requests: mine-1 127.0.0.1 GET '/health' 200 \d+\.\d{3} s\n"
    until(lambda: re.search(form, locked.stderr()))
    until(lambda: r"mine-2 127.0.0.1 GET '/nowhere\nand' 404" in locked.stderr())


def test_answers_are_counted_by_status(locked):
    """Including those that the connection itself gives."""

    def counts() -> Counter[Any]:
        name = 'staircase:http_responses_total{status="%d"}'
        found = read_metrics(locked, FILE_KEY)
        return Counter({code: found.get(name % code, 0) for code in (200, 401, 404, 413, 431)})

    before = counts()
    for path, sent in (("/v1/models", {}), ("/nothing", bearer(FILE_KEY)), ("/", {})):
        get(locked, path, headers=sent)
    for data in (headers(20_000, "one"), chunks(1000)):
        exchange(locked, data)
    assert counts() - before == {200: 2, 401: 1, 404: 1, 413: 1, 431: 1}


def test_no_part_of_a_request_reaches_the_log(server):
    """A prompt with a line break wrote lines of its own into the log; and prompts are private."""
    line = f"x\n2026-01-01 00:00:00 ERROR staircase: {WORD}"
    for fields in ({"prompt": line}, {"model": line}, {"user": line}, {"prompt": [line, 5]}):
        post(server, json={"prompt": PROMPT, "max_tokens": 1, **fields})
    get(server, f"/%0a{WORD}")
    exchange(server, f"GET /{WORD} NOT-HTTP\r\n{WORD}\r\n\r\n".encode())
    assert WORD not in server.stderr()


def test_a_log_that_is_not_read_stops_nothing_and_counts_what_it_drops(monkeypatch):
    """A full pipe at standard error stopped the event loop, and with it the server."""
    monkeypatch.setattr(logs, "MOST_LINES", 100)
    reading, writing = os.pipe()
    most = 20_000  # more than the pipe holds
    with open(reading, encoding="utf-8") as lines, open(writing, "w", encoding="utf-8") as pipe:
        queued = Queued(pipe)
        for number in range(most):
            queued.emit(logging.LogRecord("a", logging.INFO, "", 1, "line %d", (number,), None))
        kept = dropped = 0
        while kept + dropped < most:
            if match := re.match(r"\((\d+) lines were dropped", lines.readline()):
                dropped += int(match[1])
            else:
                kept += 1
    assert kept + dropped == most and dropped > 1000


def test_a_flood_of_trouble_is_a_line_a_second(server):
    """In the server's log, and for the filter by itself."""
    before, started = len(server.stderr().splitlines()), time.monotonic()

    def lines() -> int:
        exchange(server, b"NOT HTTP\r\n\r\n")
        return len(server.stderr().splitlines()) - before

    until(lines, server.stderr)
    assert max(lines() for _ in range(50)) <= 2 + time.monotonic() - started
    sparing = Sparing()
    records = [logging.LogRecord("a", logging.ERROR, "", 1, "failed", (), None) for _ in range(9)]
    assert [sparing.filter(record) for record in records] == [True, *[False] * 8]
    other = logging.LogRecord("a", logging.ERROR, "", 1, "another", (), None)
    assert sparing.filter(other) and other.msg == "another"
    sparing.last.clear()
    assert sparing.filter(records[1]) and records[1].msg == "failed (and 8 more of this kind)"


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version"])
def test_pages_and_health_answer_head(server, path):
    full, head = get(server, path), ask(server, "HEAD", path)
    assert head.status_code == full.status_code == 200 and head.content == b""
    assert head.headers["content-length"] == str(len(full.content))
