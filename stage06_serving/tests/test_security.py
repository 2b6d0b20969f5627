"""Mechanisms that brought other servers down, each by the number under which it was published. None of them may work here."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import secrets
import socket
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from fastapi import FastAPI

from shared.errors import UserError
from stage05_paged.blocks import chain
from stage06_serving.__main__ import make_engine
from stage06_serving.chat import SIMPLE
from stage06_serving.guard import LARGEST_BODY, Guard
from stage06_serving.protocol import (
    LONGEST_STOP,
    MOST_BIASES,
    MOST_MESSAGES,
    MOST_PROMPTS,
    MOST_SAMPLES,
    Message,
)
from stage06_serving.settings import Settings

PROMPT = "Once upon a time"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LARGEST_ERROR = 2048  # bytes
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def http(server):
    with httpx2.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        yield client
        assert (
            client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200
        )  # it has survived


def refused(answer, status=400):
    """The message of a refusal, which is small, has the form of all errors, and tells nothing of the server's inside."""
    assert answer.status_code == status, answer.text[:500]
    assert len(answer.content) <= LARGEST_ERROR
    error = answer.json()["error"]
    assert error["code"] == status and error.keys() == {"message", "type", "param", "code"}
    assert not any(
        word in answer.text
        for word in ("Traceback", ".py", "site-packages", str(Path.home()), str(Path.cwd()))
    )
    return error["message"]


def complete(http, **fields):
    return http.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 2, **fields})


def chat(http, **fields):
    return http.post(
        CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
    )


def send_raw(server, data, most=2**16):
    """What the server says to these bytes, until it closes or is silent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        received = b""
        try:
            connection.sendall(data)
            while len(received) < most and (more := connection.recv(2**16)):
                received += more
                connection.settimeout(1)
        except (TimeoutError, ConnectionError):
            pass
        return received


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", " \t\n", [], [[]], [""], [PROMPT, " "]])
def test_an_empty_prompt_is_refused(http, prompt):
    """CVE-2024-8768: an empty prompt ended the engine."""
    refused(complete(http, prompt=prompt))
    if isinstance(prompt, str):
        refused(http.post("/generate", json={"prompt": prompt}))


@pytest.mark.parametrize(
    "fields", [{"best_of": 10**9}, {"best_of": 2}, {"best_of": MOST_SAMPLES + 1, "n": MOST_SAMPLES}]
)
def test_best_of_cannot_multiply_the_work(http, fields):
    """CVE-2024-8939: `best_of` was work without bound."""
    refused(complete(http, **fields))


@pytest.mark.parametrize("n", [0, -1, MOST_SAMPLES + 1, 10**9, 10**30, 1.5, True, "2"])
@pytest.mark.parametrize("ask", [complete, chat])
def test_n_is_bounded_before_anything_is_made(http, ask, n):
    """CVE-2026-34756: a request was copied `n` times before it was counted."""
    assert "'n'" in refused(ask(http, n=n))


def test_a_list_of_prompts_is_bounded_and_counted(http):
    """A body of a megabyte holds a hundred thousand prompts; and 32 prompts of 16 samples are 512 sequences."""
    refused(complete(http, prompt=["a"] * (MOST_PROMPTS + 1)))
    refused(complete(http, prompt=[[5]] * 100_000))
    assert "512" in refused(
        complete(http, prompt=["a"] * MOST_PROMPTS, n=MOST_SAMPLES, temperature=1)
    )
    refused(
        http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}] * (MOST_MESSAGES + 1)})
    )


@pytest.mark.parametrize("stop", ["", [""], ["a"] * 5, "a" * (LONGEST_STOP + 1), [5], {"a": 1}])
def test_stop_strings_are_few_and_short(http, stop):
    """Each is looked for at each token."""
    refused(complete(http, stop=stop))


@pytest.mark.parametrize(
    "bias",
    [
        {str(number): 1 for number in range(MOST_BIASES + 1)},
        {"-1": 1}, {"2048": 1}, {"x": 1}, {"1e3": 1}, {"٣": 1}, {"9" * 5000: 1}, {"5": 101}, {"5": -101}, {"5": "1"}, [1],
    ],
    ids=lambda bias: str(bias)[:12],
)  # fmt: skip
def test_logit_bias_is_bounded_and_in_the_vocabulary(http, bias):
    refused(complete(http, logit_bias=bias))


BOUNDED = {
    "max_tokens": (-1, 10**7), "min_tokens": (-1, 10**7), "top_k": (-2, 10**7), "seed": (-(2**63) - 1, 2**63),
    "logprobs": (-1, 21), "temperature": (-0.1, 2.1), "top_p": (0, 1.1), "min_p": (-0.1, 1.1), "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1), "repetition_penalty": (0, 101), "stop_token_ids": ([-1], [2**31], [1] * 65),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
def test_every_number_has_bounds_on_both_sides(http, name):
    """CVE-2026-21869: a negative integer became an index into memory."""
    for value in (*BOUNDED[name], 10**400, -(10**400), True, "1"):
        assert f"'{name}'" in refused(complete(http, **{name: value}))


def test_ids_are_in_the_vocabulary(http):
    for ids in ([2048], [-1], [2**31], [2**63], [10**400]):
        refused(complete(http, prompt=ids))
        refused(http.post("/detokenize", json={"tokens": ids}))
    refused(complete(http, prompt=[2048], max_tokens=0, echo=True))


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_headers_have_an_end(server, http):
    """CVE-2025-48956: a header without end filled the memory."""
    for headers in (
        b"X: " + b"a" * 100_000,
        b"".join(b"X-%d: a\r\n" % number for number in range(10_000)),
    ):
        answer = send_raw(server, b"GET /health HTTP/1.1\r\nHost: a\r\n" + headers)
        assert (
            answer.split(b"\r\n")[0] in (b"HTTP/1.1 400 Bad Request", b"")
            and len(answer) <= LARGEST_ERROR
        )
    assert send_raw(server, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n").split(b"\r\n")[0] in (
        b"HTTP/1.1 400 Bad Request",
        b"",
    )
    assert http.get("/health").status_code == 200


def test_bodies_have_an_end(server, http):
    """Whether their length is told or not; what is over the limit is not kept."""
    assert (
        http.post(COMPLETIONS, content=b"a" * LARGEST_BODY, headers=JSON).status_code == 400
    )  # not JSON, and not too long
    refused(http.post(COMPLETIONS, content=b"a" * (LARGEST_BODY + 1), headers=JSON), 413)
    refused(http.post(COMPLETIONS, content=(b"a" * 65536 for _ in range(40)), headers=JSON), 413)
    before = psutil.Process(server.process.pid).memory_info().rss
    chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert send_raw(server, head + chunk * 500).startswith(b"HTTP/1.1 413")
    assert psutil.Process(server.process.pid).memory_info().rss - before < 16 * 2**20


LARGE = [
    {"prompt": [True] * 200_000},
    {"prompt": [[True]] * 100_000},
    {"prompt": [["a"]] * 100_000},
    {"prompt": {"a": ["b"] * 100_000}},
    {"prompt": PROMPT, "stop": [5] * 300_000},
    {"prompt": PROMPT, "stop_token_ids": ["x"] * 200_000},
    {"prompt": PROMPT, "logit_bias": {str(number): "x" for number in range(50_000)}},
    {"prompt": PROMPT, "logit_bias": {"😀" * 100_000: 1}},
    {"prompt": PROMPT, "best_of": "x" * 1_000_000},
    {"prompt": PROMPT, "stream_options": {"a" * 500_000: 1}},
    {"messages": [{}] * 200_000},
    {"messages": [{"role": "user", "content": [{"type": "x" * 900}] * 1000}]},
    {"messages": [{"role": "😀" * 100_000, "content": "a"}]},
    {"tokens": ["x"] * 200_000},
    ["x"] * 200_000,
    "x" * 1_000_000,
]


@pytest.mark.parametrize("body", LARGE, ids=lambda body: str(body)[:24])
def test_an_error_is_small_whatever_was_sent(http, body):
    """A body of four kilobytes was answered with an error of 23 megabytes elsewhere."""
    answers = [
        http.post(path, json=body)
        for path in (COMPLETIONS, CHAT, "/generate", "/tokenize", "/detokenize")
    ]
    bad = [
        answer for answer in answers if answer.status_code != 200
    ]  # some do not know the field that is wrong
    assert bad
    for answer in bad:
        refused(answer)


def test_an_error_does_not_repeat_what_was_sent(http):
    word = "a-word-of-the-client"
    for body in (
        {"prompt": [word, 5]},
        {"prompt": {word: word}},
        {"prompt": PROMPT, "n": word},
        {"prompt": PROMPT, "stop": {word: 1}},
    ):
        assert word not in refused(http.post(COMPLETIONS, json=body))
    refused(http.post(COMPLETIONS, json={"prompt": PROMPT, "model": "😀" * 100_000}), 404)
    refused(http.get("/" + "x" * 8000), 404)


# ---- what the parser lets through -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"5", b'"a"', b"\xff\xfe", b"\x00", b'{"prompt": "a"', b'{"prompt": "a",}', b"{'prompt': 'a'}",
        b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000, b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "n": ' + b"9" * 500_000 + b"}",
        b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "top_p": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "logit_bias": {"5": NaN}}', b'{"prompt": "a\xff"}',
        b'{"prompt": "a", "logit_bias": {"5": 1e999}}',
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_a_body_that_is_hard_to_read_is_refused(http, body):
    """Deep, huge, not a number, not UTF-8: each was a 500, or worse, somewhere."""
    for path in (COMPLETIONS, "/generate"):
        refused(http.post(path, content=body, headers=JSON))


LONE = "\\ud83d"  # half of a pair, as JSON writes it


@pytest.mark.parametrize(
    "path, body",
    [
        (COMPLETIONS, f'{{"prompt": "a {LONE} b", "echo": true, "logprobs": 2, "max_tokens": 2}}'),
        (COMPLETIONS, f'{{"prompt": "a {LONE}", "stop": "{LONE}", "max_tokens": 2}}'),
        (COMPLETIONS, f'{{"prompt": "a", "user": "{LONE}", "{LONE}": 1, "max_tokens": 2}}'),
        (COMPLETIONS, f'{{"prompt": "a", "model": "{LONE}"}}'),
        (COMPLETIONS, f'{{"prompt": "a", "logit_bias": {{"{LONE}": 1}}}}'),
        (COMPLETIONS, f'{{"prompt": "a", "n": "{LONE}"}}'),
        (CHAT, f'{{"messages": [{{"role": "{LONE}", "content": "{LONE}", "name": "{LONE}"}}], "max_tokens": 2}}'),
        ("/generate", f'{{"prompt": "{LONE}", "max_tokens": 2}}'),
        ("/tokenize", f'{{"prompt": "{LONE}", "return_token_strs": true}}'),
        ("/tokenize", f'{{"prompt": "a", "model": "{LONE}"}}'),
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_breaks_nothing(http, path, body):
    """JSON can say it and UTF-8 cannot, so an answer with it cannot be written: that was a 500."""
    for stream in ("false", "true"):
        answer = http.post(
            path, content=f'{body[:-1]}, "stream": {stream}}}'.encode(), headers=JSON
        )
        answer.content.decode("utf-8")
        if "user" in body:  # nobody reads it
            assert answer.status_code == 200, answer.text
        else:
            refused(answer, 404 if "model" in body else 400)


# ---- HTTP -----------------------------------------------------------------------------------------------------------

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 32\r\nContent-Length: 5\r\n\r\n" + BODY,
        POST + b"Content-Length: -5\r\n\r\n" + BODY,
        POST + b"Content-Length: 32, 5\r\n\r\n" + BODY,
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n20\r\n" + BODY + b"\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n20\r\n" + BODY + b"XX0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + BODY,
        POST + b"Content-Length : 32\r\n\r\n" + BODY,
        b"POST /v1/completions HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00" + bytes(64),
    ],
)
def test_a_message_with_two_lengths_is_refused(server, data):
    """CVE-2025-43859: who reads the end of a body otherwise than the proxy before it takes the rest for another request."""
    answer = send_raw(server, data)
    assert b" 200 " not in answer and b" 500 " not in answer
    assert answer.startswith(b"HTTP/1.1 4") or answer == b""


def test_a_body_in_chunks_that_also_tells_its_length_is_read_once(server):
    """h11 reads the chunks, as the standard has it. What the length would make of them is no second request."""
    chunks = b"20\r\n" + BODY + b"\r\n0\r\n\r\n"
    answer = send_raw(
        server, POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    )
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.split(b" ")[1] in (b"200", b"400")


def test_no_redirect_names_the_host_that_a_client_has_written(server):
    """It would come from the Host header, like the path in CVE-2026-48710: a cache in between would send others there."""
    answer = send_raw(
        server, b"GET /health/ HTTP/1.1\r\nHost: elsewhere.example\r\nConnection: close\r\n\r\n"
    )
    assert (
        answer.startswith(b"HTTP/1.1 404")
        and b"elsewhere" not in answer
        and b"location" not in answer.lower()
    )


def test_a_body_that_comes_too_slowly_is_not_waited_for(monkeypatch):
    """A byte now and then would hold a connection, and what has come of the body, for ever."""
    monkeypatch.setattr("stage06_serving.guard.SLOWEST_BODY", 0.05)
    said: list[Any] = []

    async def receive():
        if not said:
            said.append("the first byte")
            return {"type": "http.request", "body": b"{", "more_body": True}
        await asyncio.Event().wait()

    async def send(message):
        said.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(asyncio.wait_for(Guard(FastAPI())(scope, receive, send), 30))
    _, start, body = said
    assert start["status"] == 408 and json.loads(body["body"])["error"]["code"] == 408


def test_only_json_is_read_and_no_origin_is_allowed(http):
    """A page on another site may post a form or plain text to a server on the reader's machine, without asking it first."""
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=a",
        "application/jsonx",
        "",
    ):
        refused(
            http.post(
                COMPLETIONS,
                content=BODY,
                headers={"Content-Type": kind, "Origin": "http://elsewhere.example"},
            )
        )
    refused(http.post(COMPLETIONS, content=BODY))
    asked = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "POST"}
    for answer in (http.options(COMPLETIONS, headers=asked), http.get("/v1/models", headers=asked)):
        assert not any(name.startswith("access-control") for name in answer.headers)


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "x/health?",
        "x/?",
        "127.0.0.1/health#",
        "127.0.0.1/health?x=",
        "x/health/../",
        "health",
        "",
        "a@b/health?",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/live"])
def test_the_host_header_opens_nothing(locked, host, path):
    """CVE-2026-48710, CVE-2026-48746 ("BadHost"): the path that was checked was put together from the Host header."""
    answer = send_raw(
        locked, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.split(b" ")[1] in (b"401", b"400")


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models", "/health/../v1/models", "/health/..%2fv1/models", "/%2e/v1/models", "/v1/models?/health",
        "/v1/models#/health", "/v1/models;/health", "/v1/models?path=/health", "/health%2f..%2fv1/models", "/HEALTH", "/health/",
        "/%76%31/models", "http://x/health", "/health%00/v1/models", "/v1/models/", "/HEALTH/../v1/models",
        "*",
    ],
)  # fmt: skip
def test_no_way_of_writing_a_path_opens_it(locked, target):
    answer = send_raw(
        locked, f"GET {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.split(b" ")[1] in (b"401", b"400"), answer


def test_with_a_key_any_host_is_served(locked):
    text = b"GET /v1/models HTTP/1.1\r\nHost: x/health?\r\nAuthorization: Bearer first-key\r\nConnection: close\r\n\r\n"
    assert send_raw(locked, text).split(b" ")[1] == b"200"


def test_a_key_opens_everything_and_nothing_else_does(locked):
    def status(path, key=None, method="GET"):
        header = b"" if key is None else b"Authorization: " + key + b"\r\n"
        return send_raw(
            locked,
            f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n".encode()
            + header
            + b"\r\n",
        )

    for right in (
        b"Bearer first-key",
        b"bearer second-key",
        b"BEARER " + "zweiter-schlüssel".encode(),
    ):
        assert status("/v1/models", right).split(b" ")[1] == b"200"
    wrong = [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer first-key,second-key",
        b"Bearer first-ke",
        b"Bearer first-keyx",
        b"Bearer \xff",
        b"first-key",
    ]
    for key in [*wrong, b"bearer first-key x", b"Basic first-key", b"Bearer " + b"x" * 8000]:
        answer = status("/v1/models", key)
        assert (
            answer.split(b" ")[1] == b"401" and b"first" not in answer and b"second" not in answer
        )
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == 401
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
        assert status("/v1/completions", None, method).split(b" ")[1] == b"401"
    assert status("/health").split(b" ")[1] == status("/").split(b" ")[1] == b"200"
    assert "first-key" not in locked.stderr()


def test_keys_are_compared_in_constant_time(monkeypatch):
    """CVE-2025-59425: `==` ends at the first letter that differs, so time tells how many are right."""
    compared: list[tuple[bytes, bytes]] = []
    real = secrets.compare_digest

    def compare(given, known):
        compared.append((given, known))
        return real(given, known)

    monkeypatch.setattr(secrets, "compare_digest", compare)
    guard = Guard(FastAPI(), ["first", "second", "third"])
    for given, known in (
        (b"first", True),
        (b"third", True),
        (b"fourth", False),
        (b"", False),
        (b"\xff" * 5000, False),
    ):
        compared.clear()
        assert guard._known(given) is known
        assert [known for _, known in compared] == [
            hashlib.sha256(key).digest() for key in (b"first", b"second", b"third")
        ]
        assert {given for given, _ in compared} == {
            hashlib.sha256(given).digest()
        }  # of one length, whatever was sent


def test_keys_do_not_share_a_prefix(locked):
    """CVE-2025-46570: the time to the first token tells whether somebody else has asked the same."""

    def hits(key):
        def found():
            text = httpx2.get(
                f"{locked.url}/metrics",
                headers={"Authorization": "Bearer first-key"},
                trust_env=False,
                timeout=60,
            ).text
            (line,) = [
                line
                for line in text.splitlines()
                if line.startswith("vllm:prefix_cache_hits_total")
            ]
            return float(line.split()[-1])

        before = found()
        body = {"prompt": list(range(40)), "max_tokens": 1}
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx2.post(
            f"{locked.url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=30
        )
        assert answer.status_code == 200
        return found() - before

    assert [hits(key) for key in ("first-key", "first-key", "second-key", "second-key")] == [
        0,
        32,
        0,
        32,
    ]


def test_no_two_prompts_are_known_by_the_same_number():
    """CVE-2025-25183: blocks were found by Python's `hash`, and prompts can be written whose hashes are equal."""
    assert hash((-1,)) == hash((-2,))  # for instance
    digests = [
        chain(parent, tokens)
        for parent in (b"", b"somebody's salt")
        for tokens in ([1, 2], [2, 1], [1], [1, 2, 0])
    ]
    assert len({*digests}) == len(digests) and {len(digest) for digest in digests} == {
        hashlib.sha256().digest_size
    }


# ---- what clients may not bring -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat_template", "chat_template_kwargs"])
def test_a_request_brings_no_template(http, name):
    """CVE-2025-61620, CVE-2025-62426: a template of the client's ran on the event loop."""
    value = "{% for i in range(10**9) %}{% endfor %}"
    assert name in refused(
        chat(http, **{name: value if name == "chat_template" else {"chat_template": value}})
    )


def test_a_message_is_text_and_never_a_template():
    """CVE-2026-5760: a template ran as a program. Ours is one `replace`, and what it puts in is not looked at again."""
    for text in ("{{7*7}}", "{content}", "{0.__class__}", "%s %(a)s", "${x}", "{% raw %}"):
        assert SIMPLE.prompt([Message(role="user", content=text)]) == f"User: {text}\nAssistant:"
        assert text in SIMPLE.prompt([Message(role="{content}", content=text)])


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(a+)+$"}, {"guided_json": {"type": "x"}}, {"guided_grammar": "root ::= root"}, {"guided_choice": ["a"]},
        {"structured_outputs": {"regex": "(a+)+$"}}, {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"response_format": "("}, {"tools": [{"type": {}}]}, {"functions": [{"name": "("}]},
    ],
    ids=str,
)  # fmt: skip
def test_no_regular_expression_or_schema_of_a_client_is_compiled(http, fields):
    """CVE-2025-48887, CVE-2025-48942, CVE-2025-48943, CVE-2025-48944: one that was wrong, or slow, ended the worker."""
    refused(complete(http, **fields))
    refused(chat(http, **fields))


def test_no_tensors_and_no_addresses(http):
    """CVE-2025-62164: tensors of clients were unpickled. CVE-2026-22773 and its like: the server fetched what it was told to."""
    refused(complete(http, prompt_embeds="gASVAAAA"))
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.3)
        url = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/x.png"
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": url}},
        ):
            refused(http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]}))
        assert (
            http.post(
                CHAT, json={"messages": [{"role": "user", "content": url}], "max_tokens": 1}
            ).status_code
            == 200
        )
        with pytest.raises(TimeoutError):  # nobody came
            elsewhere.accept()


class Opened:
    """A pickle that does something when it is read."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_no_pickle_is_read(tiny_folder, tmp_path, name):
    """CVE-2025-32434, CVE-2026-24747, CVE-2025-24357: weights in a pickle are a program, even with `weights_only`."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in ("config.json", "vocab.json", "merges.txt"):
        (folder / file).write_bytes((tiny_folder / file).read_bytes())
    (folder / name).write_bytes(pickle.dumps(Opened(tmp_path / "opened")))
    with pytest.raises(UserError, match="safetensors"):
        make_engine(Settings(model=str(folder)))
    assert not (tmp_path / "opened").exists()


def test_no_code_that_comes_with_a_model_is_run(tiny_folder, tmp_path):
    """CVE-2026-22807: the folder named a Python file, and it was run without asking."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'opened')!r}, 'w')", encoding="utf-8")
    make_engine(Settings(model=str(folder), kv_memory="1MiB", linear="plain"))
    assert not (tmp_path / "opened").exists()


def test_one_process_listens_in_one_place(server):
    """CVE-2025-47277, CVE-2025-32444, CVE-2025-30165, CVE-2026-3059: pickles were taken from any machine, between processes."""
    process = psutil.Process(server.process.pid)
    assert not process.children(recursive=True)
    listening = {
        tuple(each.laddr)
        for each in process.net_connections(kind="all")
        if each.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", server.port)}


def test_nothing_of_a_request_reaches_the_log(server, http):
    """A prompt with a new line in it wrote lines of its own into the log; and prompts are nobody else's business."""
    word = "a-word-for-the-log"
    line = f"x\n2026-01-01 00:00:00 ERROR staircase: {word}"
    for body in (
        {"prompt": line},
        {"prompt": PROMPT, "model": line},
        {"prompt": PROMPT, "user": line},
        {"prompt": [line, 5]},
    ):
        http.post(COMPLETIONS, json={"max_tokens": 1, **body})
    http.get(f"/%0a{word}")
    send_raw(server, f"GET /{word} NOT-HTTP\r\n{word}\r\n\r\n".encode())
    assert word not in server.stderr()
