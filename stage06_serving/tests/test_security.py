"""Mechanisms that brought other servers down, by the number of their report. None may work here."""

from __future__ import annotations

import hashlib
import json
import pickle
import secrets
import shutil
from pathlib import Path

import psutil
import pytest
from fastapi import FastAPI

from shared.errors import UserError
from stage06_serving.__main__ import make_engine
from stage06_serving.guard import LARGEST_BODY, Guard
from stage06_serving.settings import Settings

from .asking import JSON, PROMPT, bearer, exchange, get, post, read_metrics, status_of, written

LARGEST_ERROR = 2048  # bytes
WORD = "a-word-of-the-client"
POST = written("/v1/completions", "Connection: close", JSON, method="POST")[:-2]
BODY = b'{"prompt": "a", "max_tokens": 1}'
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def refused(answer, status=400):
    """The message of a refusal, which is small and shows nothing of the server's inside."""
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


# ---- bodies -------------------------------------------------------------------------------------


def test_bodies_have_a_limit(server):
    """With their length sent before or not; what is over the limit is not kept."""
    refused(raw(server, b"a" * LARGEST_BODY), 400)  # not JSON, not too long
    refused(raw(server, b"a" * (LARGEST_BODY + 1)), 413)
    assert "not a JSON object" in refused(raw(server, b"[5]"))
    before = psutil.Process(server.process.pid).memory_info().rss
    chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    assert exchange(server, CHUNKED + chunk * 500).startswith(b"HTTP/1.1 413")
    assert psutil.Process(server.process.pid).memory_info().rss - before < 16 * 2**20


@pytest.mark.parametrize(
    "body",
    [
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
    """With a small error: four kilobytes were answered with 23 megabytes elsewhere."""
    refused(raw(server, body))


# ---- HTTP ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 32\r\nContent-Length: 5\r\n\r\n" + BODY,
        POST + b"Content-Length: -5\r\n\r\n" + BODY,
        POST + b"Content-Length: 32, 5\r\n\r\n" + BODY,
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n20\r\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"20\r\n" + BODY + b"XX0\r\n\r\n",
        CHUNKED + b"-1\r\n" + BODY,
        POST + b"Content-Length : 32\r\n\r\n" + BODY,
        b"\x16\x03\x01\x02\x00" + bytes(64),
        CHUNKED[:-2] + b"Content-Length: 4\r\n\r\n20\r\n" + BODY + b"\r\n0\r\n\r\n",
    ],
)
def test_a_message_with_two_lengths_is_refused_or_read_once(server, data):
    """CVE-2025-43859: if the server and the proxy before it disagree on the end of a body, the rest
    becomes another request."""
    answer = exchange(server, data)
    both = b"chunked\r\nContent-Length" in data  # h11 reads the chunks, as the standard has it
    assert answer[:10] in ((b"HTTP/1.1 2", b"HTTP/1.1 4") if both else (b"HTTP/1.1 4", b""))
    assert answer.count(b"HTTP/1.1 ") <= 1


def test_only_json_is_read_and_no_origin_is_allowed(server):
    """A page of another site may post a form or plain text to a local server without asking it."""
    form = "application/x-www-form-urlencoded"
    for kind in ("text/plain", form, "multipart/form-data; boundary=a", "application/jsonx", ""):
        refused(post(server, content=BODY, headers={"Content-Type": kind}))
    refused(post(server, content=BODY))
    origin = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "POST"}
    answer = get(server, "/v1/models", headers=origin)
    assert not any(name.startswith("access-control") for name in answer.headers)


# ---- keys ---------------------------------------------------------------------------------------

HOSTS = ("x/health?", "127.0.0.1/health#", "x/health/../", "", "a@b/?")
SPELLINGS = (
    *("//v1/models", "/health/../v1/models", "/health/..%2fv1/models", "/%2e/v1/models", "*"),
    *("/v1/models?/health", "/v1/models#/health", "/v1/models;/health", "/HEALTH", "/health/"),
    *("/%76%31/models", "http://x/health", "/health%00/v1/models", "/v1/models/"),
)


def asked(server, target, key="", method="GET", host="localhost"):
    """The status of a request with this header "Authorization"."""
    headers = ("Connection: close", f"Authorization: {key}")
    return status_of(exchange(server, written(target, *headers, method=method, host=host)))


def test_no_host_and_no_spelling_of_a_path_opens_it(locked):
    """CVE-2026-48710, CVE-2026-48746 ("BadHost"): the path that was checked came from the host."""
    for target, host in (
        *((path, host) for path in ("/v1/models", "/metrics", "/live") for host in HOSTS),
        *((target, "localhost") for target in SPELLINGS),
    ):
        assert asked(locked, target, host=host) in (400, 401, 403), (target, host)


def test_a_key_opens_everything_and_nothing_else_does(locked):
    path, first = "/v1/models", "Bearer first-key"
    for right in (first, "bearer second-key", "BEARER zweiter-schlüssel"):
        assert asked(locked, path, right) == 200
    wrong = ["", "Bearer", "Bearer ", f"{first},second-key", first[:-1], f"{first}x", f"{first} x"]
    for key in [*wrong, "Bearer \udcff", "first-key", "Basic first-key", "Bearer " + "x" * 8000]:
        assert asked(locked, path, key) == 401
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
        assert asked(locked, "/v1/completions", method=method) == 401
    answer = get(locked, path)
    assert "first-key" not in refused(answer, 401) + locked.stderr()
    assert answer.json()["error"]["type"] == "AuthenticationError"


def test_keys_are_compared_in_constant_time(monkeypatch):
    """CVE-2025-59425: `==` ends at the first letter that differs, and its time shows where."""
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
    """CVE-2025-46570: the time to the first token showed whether another client sent the same."""
    found, body = [], {"prompt": list(range(40)), "max_tokens": 1}
    for key in ("first-key", "first-key", "second-key", "second-key"):
        assert post(locked, json=body, headers=bearer(key)).status_code == 200
        found.append(read_metrics(locked, key)["vllm:prefix_cache_hits_total"])
    assert [count - found[0] for count in found] == [0, 32, 32, 64]


# ---- programs and addresses ---------------------------------------------------------------------


class Opened(str):
    """A pickle that opens the file with this name when it is read."""

    def __reduce__(self):
        return (open, (str(self), "w"))


def test_no_program_that_comes_with_a_model_is_run(tiny_folder, tmp_path):
    """CVE-2026-22807: its config named a Python file. CVE-2025-32434, CVE-2026-24747,
    CVE-2025-24357: weights in a pickle are a program."""
    folder, opened = shutil.copytree(tiny_folder, tmp_path / "model"), tmp_path / "opened"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "code.py").write_text(f"open({str(opened)!r}, 'w')", encoding="utf-8")
    settings = Settings(model=str(folder), kv_memory="1MiB", linear="plain")
    make_engine(settings)
    for name in ("model.safetensors", "pytorch_model.bin", "model.pt"):
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / name).write_bytes(pickle.dumps(Opened(opened)))
        with pytest.raises(UserError, match="safetensors"):
            make_engine(settings)
    assert not opened.exists()


def test_one_process_listens_on_one_address(server):
    """CVE-2025-47277, CVE-2025-32444, CVE-2025-30165, CVE-2026-3059: processes took pickles from
    any machine."""
    process = psutil.Process(server.process.pid)
    assert not process.children(recursive=True)
    connections = process.net_connections(kind="all")
    listening = {tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}
    assert listening == {("127.0.0.1", server.port)}


def test_no_part_of_a_request_reaches_the_log(server):
    """A prompt with a line break wrote lines of its own into the log; and prompts are private."""
    line = f"x\n2026-01-01 00:00:00 ERROR staircase: {WORD}"
    for fields in ({"prompt": line}, {"model": line}, {"user": line}, {"prompt": [line, 5]}):
        post(server, json={"prompt": PROMPT, "max_tokens": 1, **fields})
    get(server, f"/%0a{WORD}")
    exchange(server, f"GET /{WORD} NOT-HTTP\r\n{WORD}\r\n\r\n".encode())
    assert WORD not in server.stderr()
