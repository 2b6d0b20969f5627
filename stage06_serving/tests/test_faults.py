"""Passes that fail, an engine that dies, and signals in the middle of a stream."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import pytest

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
    read,
    since,
    text_of,
)
from stage06_serving.tests.faulty_server import until


def test_a_failing_pass_fails_only_its_requests(few, http, at_once, metrics, wait_idle):
    running, fault = few
    expected = text_of(post(http, running))
    before = wait_idle(running.url)
    fault.plant("block")
    answers = [at_once(running, SHORT) for _ in range(5)]
    until(lambda: in_flight(metrics(running.url)) == 5)
    fault.plant("once")
    found = [answer.result() for answer in answers]
    failed = [answer for answer in found if answer.status_code != 200]
    assert 1 <= len(failed) <= 2  # those in that pass
    for answer in failed:  # the cause is in the log alone
        assert answer.status_code == 500 and error_of(answer) and "planted" not in answer.text
    assert "a planted fault" in running.stderr()
    good = [text_of(answer) for answer in found if answer.status_code == 200]
    assert good == [expected] * (5 - len(failed))
    assert http.get(f"{running.url}/health").status_code == 200
    assert since(before, wait_idle(running.url))["error"] == len(failed)
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


def test_the_first_ctrl_c_drains_and_the_second_ends_the_rest(interruptible, start, http):
    running, fault = start("--grace 3600")
    fault.plant(PASS)
    with ExitStack() as stack:

        def ask(**fields):
            url, body = f"{running.url}/v1/completions", LONG | {"stream": True, **fields}
            return stack.enter_context(http.stream("POST", url, json=body)).iter_lines()

        page = stack.enter_context(http.stream("GET", f"{running.url}/live"))  # delays nothing
        assert page.status_code == 200
        ends, lasts = ask(max_tokens=20), ask()
        begun = read(ends, 3)
        running.process.send_signal(signal.SIGINT)
        until(lambda: http.get(f"{running.url}/health").json() == {"status": "draining"})
        refused = post(http, running)
        assert refused.status_code == 503 and "shutting down" in refused.text
        assert refused.headers["retry-after"]
        assert events([*begun, *ends])[-1]["choices"][0]["finish_reason"] == "length"
        running.process.send_signal(signal.SIGINT)
        *chunks, last = events(lasts)
    assert last["error"]["code"] == 503 and "shutting down" in last["error"]["message"]
    assert 6 <= len(chunks) < 200 and not any("error" in chunk for chunk in chunks)
    assert running.process.wait(HANG) == 130
    assert "Traceback" not in running.stderr(), running.stderr()
