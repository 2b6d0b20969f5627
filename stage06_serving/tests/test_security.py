"""Hostile input: bodies, hosts, keys, models with programs. The numbers are of published weaknesses
of other servers."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import secrets
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import Request

from shared.errors import UserError
from stage06_serving.access import LARGEST_BODY, Keys
from stage06_serving.errors import ApiError
from stage06_serving.loading import make_engine
from stage06_serving.settings import parse

from .tools import HANG, LARGEST_ERROR

BODY = b'{"prompt": "a", "max_tokens": 1}'
JSON = {"Content-Type": "application/json"}


def refused(answer, status=400):
    """The message of a refusal, which must be small and reveal nothing of the server's
    internals."""
    assert answer.status_code == status, answer.text[:500]
    assert len(answer.content) <= LARGEST_ERROR
    error = answer.json()["error"]
    assert error["code"] == status and error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    inside = ("Traceback", ".py", "site-packages", str(Path.home()), str(Path.cwd()))
    assert not any(word in answer.text for word in inside)
    return error["message"]


@pytest.mark.parametrize(
    "body",
    [
        *(b"a" * LARGEST_BODY, b"a" * (LARGEST_BODY + 1), b"a" * 10**8, b"[5]"),
        *(b"", b"{", b"null", b"[]", b"5", b'"a"', b"\xff\xfe", b"\x00", b'{"prompt": "a",}'),
        *(b'["x"' + b',"x"' * 200_000 + b"]", b'{"prompt": [true' + b",true" * 150_000 + b"]}"),
        b'{"prompt": "a", "logit_bias": {"' + "😀".encode() * 100_000 + b'": 1}}',
        *(rb'{"prompt": "a \ud83d b", "echo": true}', rb'{"prompt": "a", "n": "\ud83d"}'),
        *(b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000),
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        *(b'{"prompt": "a", "top_p": %s}' % number for number in (b"NaN", b"-Infinity", b"1e999")),
    ],
    ids=lambda body: repr(body[:40]),
)
def test_unreadable_bodies_are_refused(server, body):
    """With a small error: elsewhere, 4 kilobytes were answered with 23 megabytes."""

    def pieces():
        yield body

    for content in (body, pieces()):  # with a length and without
        try:
            answer = server.post(content=content, headers=JSON)
        except httpx2.TransportError:  # the server has closed, and reads no 100 MB
            assert len(body) > 10 * LARGEST_BODY
            continue
        message = refused(answer, 413 if len(body) > LARGEST_BODY else 400)
        assert body != b"[5]" or "not a JSON object" in message


def test_only_json_is_read(server):
    """A page of another site may post a form or plain text to a local server without its
    consent."""
    form = "application/x-www-form-urlencoded"
    for kind in ("text/plain", form, "multipart/form-data; boundary=a", "application/jsonx", ""):
        answer = server.post(content=BODY, headers={"Content-Type": kind})
        assert "application/json" in refused(answer)
    answer = server.post(content=BODY, headers=JSON | {"Content-Encoding": "gzip"})
    assert "Content-Encoding" in refused(answer, 415)


def test_every_error_is_an_error_object(server):
    for method, path, status in (
        *(("POST", "/v1/completions", 400), ("GET", "/v1/completions", 405)),
        ("DELETE", "/v1/models", 405),
        *(("GET", path, 404) for path in ("/v1/nothing", "/docs")),
        ("POST", "/v1/responses", 404),
    ):
        answer = server.ask(method, path, json={})
        message = refused(answer, status)
        assert status != 405 or answer.headers["allow"]
        assert path != "/v1/responses" or "/v1/chat/completions" in message


HOSTS = ("x/health?", "127.0.0.1/health#", "x/health/../", "a@b/?")
SPELLINGS = ("//v1/models", "/health/../v1/models", "/health/..%2fv1/models", "/%2e/v1/models",
             "/v1/models?/health", "/v1/models;/health", "/%76%31/models", "/a/")  # fmt: skip
NAMES = "localhost LOCALHOST:8000 127.0.0.1:80 [::1]:80 OTHER inner.example"
BAD = "evil.example localhost.evil.example 127.0.0.1.nip.io localhost@evil x:y [evil] 10.0.0.1"


def asked(server, target, key=b"", host="localhost"):
    """The status of a request, sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG)
    connection.putrequest("GET", target, skip_host=True)
    connection.putheader("Host", host)
    connection.putheader("Authorization", key)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


def test_only_a_host_of_the_server_is_served_and_no_spelling_opens_a_path(locked):
    """CVE-2026-48710, CVE-2026-48746 ("BadHost"): the path that was checked came from the host. DNS
    rebinding: the name of another site stands for 127.0.0.1, and its page reads answers."""
    for target, host in (
        *((path, host) for path in ("/v1/models", "/metrics", "/live") for host in HOSTS),
        *((target, "localhost") for target in SPELLINGS),
    ):
        assert asked(locked, target, host=host) in (400, 401, 404, 307), (target, host)
    for host in (*NAMES.split(), *BAD.split()):
        assert asked(locked, "/health", host=host) == (200 if host in NAMES.split() else 400), host
    assert parse(["--host", "0.0.0.0"]).hosts == ["*"]
    assert parse(["--host", "a", "--allowed-host", " b ,"]).hosts[-2:] == ["a", "b"]


def test_a_key_opens_every_route_but_two_and_nothing_else_does(locked):
    path, first = "/v1/models", b"Bearer first-key"
    for right in (first, b"bearer second-key", "BEARER zweiter-schlüssel".encode()):
        assert asked(locked, path, right) == 200, right
    wrong = [b"", b"Bearer ", b"%s,second-key" % first, first[:-1], b"Bearer \xff", b"first-key"]
    for key in [*wrong, b"Basic first-key", b"Bearer " + b"x" * 8000]:
        assert asked(locked, path, key) == 401, key
    answer = locked.ask("GET", path)
    assert "first-key" not in refused(answer, 401)
    assert locked.ask("HEAD", "/health").status_code == 200
    assert answer.headers["www-authenticate"] == "Bearer"
    paths = locked.ask("GET", "/openapi.json").json()["paths"]
    routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    assert {("GET", "/live"), ("POST", "/generate"), ("GET", "/metrics")} <= {*routes}
    for (method, path), key in product([*routes, ("HEAD", "/metrics")], ("wrong", "first-key")):
        body: Any = {} if method == "POST" else None
        answer = locked.ask(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
        allowed = path in ("/health", "/ready") or key == "first-key"
        assert (answer.status_code != 401) == allowed, path


async def test_keys_are_compared_in_constant_time(monkeypatch):
    """CVE-2025-59425: `==` stops at the first letter that differs, so its time reveals where."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(*pair):
        compared.append(pair)
        return pair[0] == pair[1]

    monkeypatch.setattr(secrets, "compare_digest", compare)
    keys = Keys(("first", "second", "third"))
    for key in (b"first", b"\xff" * 50):
        compared.clear()
        request = Request({"type": "http", "headers": [(b"authorization", b"Bearer " + key)]})
        with contextlib.suppress(ApiError):
            await keys(request)
        digest = hashlib.sha256(key).digest()  # of one length, whatever was sent
        assert compared == [(digest, one) for one in keys.digests] and len(compared) == 3


def test_keys_do_not_share_a_prefix(locked):
    """CVE-2025-46570: the time to the first token showed whether another client had sent the same
    prompt. OpenAI's clients read `cached_tokens`, too; a prompt's last token is always computed."""
    cached, body = [], {"prompt": list(range(40)), "max_tokens": 1}
    for key in ("first-key", "first-key", "second-key", "second-key"):
        answer = locked.post(json=body, headers={"Authorization": f"Bearer {key}"}).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32, 0, 32]


def test_no_pickle_is_loaded(tiny_folder, tmp_path):
    """CVE-2025-32434, CVE-2026-24747, CVE-2025-24357: it is a program."""
    folder, opened = shutil.copytree(tiny_folder, tmp_path / "model"), tmp_path / "opened"
    for name in ("model.safetensors", "pytorch_model.bin", "model.pt"):
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / name).write_bytes(f"cbuiltins\nopen\n(V{opened}\nVw\ntR.".encode())
        with pytest.raises(UserError, match="safetensors"):
            make_engine(parse(["--model", str(folder)]))
    assert not opened.exists()
