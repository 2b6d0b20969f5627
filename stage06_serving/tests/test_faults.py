"""Passes that fail, an engine that dies, and signals in the middle of a stream."""

from __future__ import annotations

import contextlib
import signal
import socket
from contextlib import ExitStack

import httpx2
import pytest

from shared.server import python
from stage06_serving.tests.conftest import environment
from stage06_serving.tests.crowd import (
    HANG,
    LONG,
    PASS,
    SHORT,
    ended,
    error_of,
    events,
    in_flight,
    post,
    post_bytes,
    read,
    since,
    text_of,
)
from stage06_serving.tests.faulty_server import MODULE, until


def test_a_failing_pass_is_a_500_and_its_cause_is_in_the_log_alone(few, http, metrics, wait_idle):
    running, fault = few
    expected, before = text_of(post(http, running)), wait_idle(running.url)
    fault.plant("once")
    failed = post(http, running)
    assert failed.status_code == 500 and error_of(failed) and "planted" not in failed.text
    assert "a planted fault" in running.stderr()
    assert http.get(f"{running.url}/health").status_code == 200
    assert since(before, wait_idle(running.url))["error"] == 1
    assert text_of(post(http, running)) == expected


@pytest.mark.parametrize("what", ["always", "exit"])
def test_a_dead_engine_is_reported_and_no_client_hangs(lodge, http, at_once, metrics, what):
    """A supervisor looks at /health: it must see that only a restart helps."""
    running, fault = lodge("--max-sequences 2")
    fault.plant("block")
    answers = [at_once(running, SHORT | {"stream": number % 2 == 0}) for number in range(8)]
    until(lambda: in_flight(metrics(running.url)) == 8)
    fault.plant(what)
    until(lambda: http.get(f"{running.url}/health").status_code == 503)
    for number, answer in enumerate(answers):
        found = answer.result()
        error = error_of(found) if number % 2 else events(found.text.splitlines())[-1]["error"]
        assert error["code"] in (500, 503) and error["message"]  # in the pass, or in the queue
    assert ended(metrics(running.url), "error") == 8
    for fields in ({}, {"stream": True}, {"max_tokens": 0, "echo": True, "logprobs": 0}):
        answer = post(http, running, SHORT | fields)
        assert answer.status_code == 503 and "restart" in error_of(answer)["message"]
    assert error_of(http.get(f"{running.url}/health"))["code"] == 503


@pytest.mark.parametrize("status", [500, 504], ids=["a pass fails", "too late"])
def test_a_stream_never_just_ends(few, hasty, http, status):
    """OpenAI's client takes a stream that just ends for a complete answer."""
    running, fault = few if status == 500 else hasty
    fault.plant(PASS)
    body = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "n": 2}
    url = f"{running.url}/v1/chat/completions"
    with http.stream("POST", url, json=body | {"stream": True}) as stream:
        lines = stream.iter_lines()
        begun = read(lines, 1)
        if status == 500:
            fault.plant("once")
        *chunks, last = events([*begun, *lines])
    assert not any("error" in chunk for chunk in chunks)
    assert last["error"]["code"] == status and last["error"]["message"]


def test_what_does_not_end_within_the_grace_gets_an_error(start, at_once, metrics):
    running, fault = start("--grace 0.3 --max-sequences 2")
    fault.plant("0.1")
    answers = [at_once(running, LONG | {"stream": number == 0}) for number in range(4)]
    until(lambda: in_flight(metrics(running.url)) == 4)
    running.process.terminate()
    stream, *whole = [answer.result() for answer in answers]
    last = events(stream.text.splitlines())[-1]["error"]
    assert last["code"] == 503 and "shutting down" in last["message"]
    for answer in whole:
        assert answer.status_code == 503 and "shutting down" in error_of(answer)["message"]
    assert running.process.wait(HANG) == -signal.SIGTERM


def test_loading_draining_and_hurrying(new_fault, tiny_folder, http):
    """/health: the process works. /ready: it takes requests. The first signal lets answers end,
    the second ends them; slow bodies and open pages delay nothing, and no traceback is logged."""
    fault, env = new_fault()
    fault.plant("loading")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = f"-m {MODULE} --port {port} --linear plain --grace 3600 --model {tiny_folder}"
    with python(arguments.split(), environment(env)) as running, ExitStack() as stack:
        running.url = url = f"http://127.0.0.1:{port}"

        def answers(path, status):
            with contextlib.suppress(httpx2.TransportError):
                answer = http.get(url + path)
                return answer.status_code == status and answer.json()

        def ask(**fields):
            body = LONG | {"stream": True, **fields}
            asked = http.stream("POST", f"{url}/v1/completions", json=body)
            return stack.enter_context(asked).iter_lines()

        until(lambda: answers("/ready", 503))
        assert answers("/health", 200) == {"status": "loading"}
        early = post(http, running)
        assert early.headers["retry-after"] and "loaded" in error_of(early)["message"]
        fault.plant(PASS)
        until(lambda: answers("/ready", 200) == {"status": "ok"})
        slow = [socket.create_connection(("127.0.0.1", port), timeout=HANG) for _ in range(3)]
        for each in slow:
            stack.enter_context(each).sendall(post_bytes(SHORT)[:-3])
        assert stack.enter_context(http.stream("GET", f"{url}/live")).status_code == 200
        ends, lasts = ask(max_tokens=20), ask()
        begun = read(ends, 3)
        running.process.terminate()
        until(lambda: answers("/health", 200) == {"status": "draining"})
        for refused in (post(http, running), http.get(f"{url}/ready")):
            assert refused.status_code == 503 and refused.headers["retry-after"]
        assert events([*begun, *ends])[-1]["choices"][0]["finish_reason"] == "length"
        running.process.terminate()
        *chunks, last = events(lasts)
        assert last["error"]["code"] == 503 and "shutting down" in last["error"]["message"]
        assert 6 <= len(chunks) < 200 and not any("error" in chunk for chunk in chunks)
        assert [each.recv(2**16).split(b" ")[1] for each in slow] == [b"503"] * 3
        assert running.process.wait(HANG) == -signal.SIGTERM
        log = running.stderr()
    assert "Traceback" not in log and "ERROR" not in log, log
