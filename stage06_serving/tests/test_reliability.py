"""What clients and faults can do to a server, and what must be left of it: real processes, real sockets, and clients that leave,
stall, and come in crowds; passes that fail, threads that end, signals in the middle of a stream."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import openai
import pytest

from stage06_serving.tests.faulty_server import MODULE, VARIABLE, Fault, until

HANG = 60.0  # seconds: what takes longer has been forgotten
IDS = [10, 20, 30, 40]
LONG = {"prompt": IDS, "temperature": 0, "ignore_eos": True, "max_tokens": 200}
SHORT = LONG | {"max_tokens": 8}
SCORED = LONG | {"max_tokens": 0, "echo": True, "logprobs": 1}  # the prompt alone
DONE = "data: [DONE]"
PASS = "0.05"  # seconds more for each pass: 200 tokens take ten seconds, and nobody waits for so long here


@pytest.fixture(scope="module")
def faults():
    """All that can be planted."""
    return []


@pytest.fixture(autouse=True)
def mended(faults):
    yield
    for fault in faults:
        fault.mend()


@pytest.fixture(scope="module")
def new_fault(tmp_path_factory, faults):
    """new_fault(): a fault, and the variable by which a server is told of it."""

    def new():
        faults.append(Fault(tmp_path_factory.mktemp("faults") / "fault"))
        return faults[-1], {VARIABLE: str(faults[-1].file)}

    return new


@pytest.fixture(scope="module")
def lodge(house, tiny_folder, new_fault):
    """lodge(*arguments): a server on the tiny model whose passes can be made to fail, and its fault. Nobody may stop it."""

    def lodge(*arguments):
        fault, env = new_fault()
        return house("--model", str(tiny_folder), *arguments, env=env), fault

    return lodge


@pytest.fixture
def start(serve, tiny_folder, new_fault):
    """start(*arguments): the same in a process of its own, which ends with the test."""
    with ExitStack() as stack:

        def start(*arguments):
            fault, env = new_fault()
            running = stack.enter_context(
                serve("--model", str(tiny_folder), *arguments, env=env, module=MODULE)
            )
            return running, fault

        yield start


@pytest.fixture(scope="module")
def few(lodge):
    """Two run and three wait."""
    return lodge("--max-sequences", "2", "--max-queue", "3")


@pytest.fixture(scope="module")
def many(lodge):
    """Room for a crowd."""
    return lodge("--max-sequences", "24", "--max-queue", "300", "--kv-memory", "1MiB")


@pytest.fixture(scope="module")
def hasty(lodge):
    """A request has one second."""
    return lodge("--request-timeout", "1", "--max-sequences", "4")


@pytest.fixture(scope="module")
def http():
    with httpx2.Client(
        trust_env=False, timeout=HANG, limits=httpx2.Limits(max_connections=None)
    ) as client:
        yield client


@pytest.fixture
def at_once(http):
    """at_once(url, body): the future of an answer."""
    with ThreadPoolExecutor(64) as pool:
        yield lambda url, body: pool.submit(http.post, f"{url}/v1/completions", json=body)


def post(http, running, body=SHORT):
    return http.post(f"{running.url}/v1/completions", json=body)


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def error_of(answer):
    """The error object of a whole answer."""
    error = answer.json()["error"]
    assert error["code"] == answer.status_code and error.keys() == {
        "message",
        "type",
        "param",
        "code",
    }
    return error


def events(lines):
    """The data of a stream to its end: what came before [DONE], which must be the last."""
    found = [line for line in lines if line]
    assert found[-1] == DONE and found.count(DONE) == 1
    return [json.loads(line.removeprefix("data: ")) for line in found[:-1]]


def read(lines, count):
    """The first `count` events of a stream."""
    found: list[str] = []
    while len(found) < count:
        found += [line for line in [next(lines)] if line]
    return found


def post_bytes(body, path="/v1/completions"):
    """The bytes of a POST."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def in_hand(numbers):
    return numbers["vllm:num_requests_running"] + numbers["vllm:num_requests_waiting"]


def ended(numbers, reason):
    return numbers[f'vllm:request_success_total{{finished_reason="{reason}"}}']


def since(before, now):
    """What a server has counted in between: ended sequences by reason, tokens, and requests that it refused."""
    found = {
        reason: ended(now, reason) - ended(before, reason)
        for reason in ("stop", "length", "abort", "error")
    }
    for name, counter in (("tokens", "generation_tokens"), ("rejected", "admission_rejections")):
        found[name] = now[f"vllm:{counter}_total"] - before[f"vllm:{counter}_total"]
    return found


# ---- clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "no stream"])
def test_a_client_that_leaves_gives_its_blocks_back(few, http, metrics, wait_idle, streams):
    running, fault = few
    before = wait_idle(running.url)
    fault.plant(PASS)
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(post_bytes(LONG | {"stream": streams}))
        until(lambda: since(before, metrics(running.url))["tokens"] >= 3)
    found = since(before, wait_idle(running.url))
    assert (found["abort"], found["length"]) == (1, 0) and found["tokens"] < 100
    fault.mend()
    assert post(http, running).status_code == 200


def test_a_client_that_leaves_while_it_waits_is_never_served(few, http, metrics, wait_idle):
    running, fault = few
    before = wait_idle(running.url)
    fault.plant("block")
    with ExitStack() as stack:
        for number in range(5):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            connection.sendall(post_bytes(SHORT | {"stream": number % 2 == 0}))
        until(lambda: in_hand(metrics(running.url)) == 5)
    time.sleep(0.3)  # the engine stands still, so nothing shows when the server has noticed
    fault.mend()
    found = since(before, wait_idle(running.url))
    assert found["abort"] == 5 and found["tokens"] <= 2  # of the pass that had begun
    assert post(http, running).status_code == 200


PHASES = ("connected", "header", "body", "sent", "queue", "decode", "last")


async def leave(port, phase, streams, chance):
    """Come, go as far as `phase`, and leave: with a polite end, or with none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = (SHORT if phase == "last" else LONG) | {"stream": streams, "prompt": "abcd"}
    whole = post_bytes(body, chance.choice(["/v1/completions", "/generate"]))
    upto = {"connected": 0, "header": whole.index(b"\r\n\r\n") // 2, "body": len(whole) - 5}.get(
        phase, len(whole)
    )
    writer.write(whole[:upto])
    await writer.drain()
    if phase == "queue":
        await asyncio.sleep(chance.random() * 0.2)
    if phase == "decode" and streams:
        for _ in range(chance.randrange(1, 4)):
            await reader.readuntil(b"\n\n")
    if phase == "last":
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"[DONE]\n\n" if streams else b"}}")
    if chance.random() < 0.5:  # a reset
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    writer.close()


def test_a_storm_of_clients_that_leave(many, http, wait_idle):
    """Two hundred, streaming and not, each gone at another moment. Nothing of them is left."""
    running, _ = many
    expected = text_of(post(http, running))
    before, said = wait_idle(running.url), running.stderr()
    chance = random.Random(0)
    clients = [
        (PHASES[number % len(PHASES)], number // len(PHASES) % 2 == 0) for number in range(200)
    ]

    async def one(phase, streams):
        await asyncio.sleep(chance.random())
        await leave(running.port, phase, streams, chance)

    async def storm():
        async with asyncio.timeout(2 * HANG):
            await asyncio.gather(*(one(*client) for client in clients))

    asyncio.run(storm())
    found = since(before, wait_idle(running.url))
    assert found["abort"] >= clients.count(
        ("decode", True)
    )  # they had seen a word, and did not wait for the two hundredth
    assert found["length"] >= clients.count(("last", True)) + clients.count(("last", False))
    assert found["error"] == 0
    assert text_of(post(http, running)) == expected
    assert "Traceback" not in running.stderr().removeprefix(said), running.stderr()


# ---- overload -------------------------------------------------------------------------------------------------------


def test_exactly_the_surplus_is_refused(few, http, at_once, metrics, wait_idle):
    """Five have a place. The others are told so while the engine stands still, so nothing waits to refuse them."""
    running, fault = few
    before = wait_idle(running.url)
    fault.plant("block")
    answers = [at_once(running.url, SHORT | {"stream": number % 2 == 0}) for number in range(12)]
    until(lambda: sum(answer.done() for answer in answers) == 7)
    for answer in [answer.result() for answer in answers if answer.done()]:
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert error_of(answer)["type"] == "ServiceUnavailableError"
    assert in_hand(metrics(running.url)) == 5
    fault.mend()
    assert sum(answer.result().status_code == 200 for answer in answers) == 5
    found = since(before, wait_idle(running.url))
    assert (found["rejected"], found["length"]) == (7, 5)


def test_each_sample_takes_a_place_and_gives_it_back(few, http, at_once, metrics, wait_idle):
    running, fault = few
    before = wait_idle(running.url)
    drawn = SHORT | {"temperature": 1, "seed": 1}
    for _ in range(3):  # each time all places are free again
        fault.plant("block")
        accepted = [at_once(running.url, drawn | {"n": 3})]
        until(lambda: in_hand(metrics(running.url)) == 3)
        assert post(http, running, drawn | {"n": 3}).status_code == 503
        assert (
            post(http, running, SHORT | {"prompt": [IDS] * 3}).status_code == 503
        )  # prompts count, too
        accepted.append(at_once(running.url, SHORT | {"prompt": [IDS] * 2}))
        until(lambda: in_hand(metrics(running.url)) == 5)
        assert post(http, running).status_code == 503
        fault.mend()
        assert [len(text_of(answer.result())) for answer in accepted] == [3, 2]
        wait_idle(running.url)
        assert post(http, running, SHORT | {"prompt": [300]}).status_code == 400
        fault.plant("once")
        assert post(http, running, drawn | {"n": 5}).status_code == 500
        wait_idle(running.url)
    assert since(before, wait_idle(running.url))["length"] >= 15


def test_a_prompt_that_is_scored_takes_a_place_too(few, http, at_once, metrics, wait_idle):
    """`echo` without tokens is work of the engine's, though no sequence: while it stands still, no crowd may wait for it. Whoever
    leaves gives the place back at once."""
    running, fault = few
    five = SCORED | {"prompt": [IDS] * 5}

    def places_taken():
        """As somebody hears who would need all of them."""
        (taken,) = re.findall(
            "The server has ([0-9]+) sequences in flight",
            error_of(post(http, running, five))["message"],
        )
        return int(taken)

    before = wait_idle(running.url)
    fault.plant("block")
    answers = [at_once(running.url, SHORT)]
    until(lambda: in_hand(metrics(running.url)) == 1)
    answers += [at_once(running.url, SCORED | {"stream": number % 2 == 0}) for number in range(7)]
    until(lambda: sum(answer.done() for answer in answers) == 3)
    assert post(http, running, SCORED).status_code == post(http, running).status_code == 503
    fault.mend()
    assert sorted(answer.result().status_code for answer in answers) == [200] * 5 + [503] * 3

    fault.plant("block")
    answer = at_once(running.url, SHORT)
    until(lambda: in_hand(metrics(running.url)) == 1)
    with ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            connection.sendall(post_bytes(SCORED | {"prompt": [IDS] * 2}))
        until(lambda: places_taken() == 5)
    until(lambda: places_taken() == 1)
    fault.mend()
    assert answer.result().status_code == 200
    assert len(text_of(post(http, running, five))) == 5
    assert since(before, wait_idle(running.url))["length"] == 2  # what was scored is no sequence


# ---- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", [PASS, "block"], ids=["slow", "stuck"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_late_request_is_aborted_and_answered_504(hasty, http, wait_idle, pace, n):
    running, fault = hasty
    before = wait_idle(running.url)
    fault.plant(pace)
    answer = post(http, running, LONG | {"n": n, "temperature": 1})
    assert answer.status_code == 504 and error_of(answer)["type"] == "TimeoutError"
    assert answer.headers["x-should-retry"] == "false"  # a client that tries again makes it worse
    if pace == "block":
        fault.mend()
    found = since(before, wait_idle(running.url))
    assert found["abort"] == n and found["tokens"] < 100 * n
    fault.mend()
    assert post(http, running).status_code == 200


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_late_echo_is_answered_504(hasty, http, at_once, metrics, wait_idle, tokens):
    """The prompt's log-probabilities are computed before an answer begins, and their time counts."""
    running, fault = hasty
    before = wait_idle(running.url)
    fault.plant("block")
    beside = at_once(running.url, SHORT)
    until(lambda: in_hand(metrics(running.url)) == 1)
    answer = post(http, running, SCORED | {"max_tokens": tokens, "stream": True})
    assert (
        answer.status_code == 504 and error_of(answer)["type"] == "TimeoutError"
    )  # the stream has not begun
    assert answer.headers["x-should-retry"] == "false" and beside.result().status_code == 504
    fault.mend()
    assert since(before, wait_idle(running.url))["abort"] == (2 if tokens else 1)
    assert post(http, running, SCORED).status_code == 200


def test_a_late_stream_says_so(hasty, wait_idle):
    running, fault = hasty
    before = wait_idle(running.url)
    fault.plant(PASS)
    with openai.OpenAI(
        base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=HANG
    ) as client:
        (model,) = client.models.list()
        with pytest.raises(openai.APIError, match="longer than the server allows"):
            list(
                client.completions.create(
                    model=model.id,
                    prompt=IDS,
                    max_tokens=200,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
            )
    assert since(before, wait_idle(running.url))["abort"] == 1


def test_health_answers_while_the_engine_computes(few, http, at_once, metrics):
    """The engine stands in a pass, and everything that does not need it goes on."""
    running, fault = few
    fault.plant("block")
    answer = at_once(running.url, SHORT)
    until(lambda: in_hand(metrics(running.url)) == 1)
    for _ in range(20):
        assert http.get(f"{running.url}/health").json() == {"status": "ok"}
    assert http.post(f"{running.url}/tokenize", json={"prompt": "abc"}).json()["count"] == 3
    assert not answer.done()
    fault.mend()
    assert answer.result().status_code == 200


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_a_failing_pass_fails_only_its_requests(few, http, at_once, metrics, wait_idle):
    running, fault = few
    expected = text_of(post(http, running))
    before = wait_idle(running.url)
    fault.plant("block")
    answers = [at_once(running.url, SHORT) for _ in range(5)]
    until(lambda: in_hand(metrics(running.url)) == 5)
    fault.plant("once")
    found = [answer.result() for answer in answers]
    failed = [answer for answer in found if answer.status_code != 200]
    assert 1 <= len(failed) <= 2  # one or two were in that pass
    for answer in failed:
        assert (
            answer.status_code == 500 and error_of(answer) and "planted" not in answer.text
        )  # the log alone says what it was
    assert "a planted fault" in running.stderr()
    assert [text_of(answer) for answer in found if answer.status_code == 200] == [expected] * (
        5 - len(failed)
    )
    assert http.get(f"{running.url}/health").status_code == 200
    assert since(before, wait_idle(running.url))["error"] == len(failed)
    assert text_of(post(http, running)) == expected


@pytest.mark.parametrize("what", ["always", "exit"])
def test_a_dead_engine_says_so_and_nobody_hangs(lodge, http, at_once, metrics, what):
    """/health is what a supervisor looks at: it must see that only a restart helps."""
    running, fault = lodge("--max-sequences", "2")
    fault.plant("block")
    answers = [at_once(running.url, SHORT | {"stream": number % 2 == 0}) for number in range(8)]
    until(lambda: in_hand(metrics(running.url)) == 8)
    fault.plant(what)
    until(lambda: http.get(f"{running.url}/health").status_code == 503)
    for number, answer in enumerate(answers):
        found = answer.result()
        error = error_of(found) if number % 2 else events(found.text.splitlines())[-1]["error"]
        assert (
            error["code"] in (500, 503) and error["message"]
        )  # in the pass that failed, or in line
    assert ended(metrics(running.url), "error") == 8
    for body in (
        SHORT,
        SHORT | {"stream": True},
        SHORT | {"max_tokens": 0, "echo": True, "logprobs": 0},
    ):
        answer = post(http, running, body)
        assert answer.status_code == 503 and "restart" in error_of(answer)["message"]
    assert error_of(http.get(f"{running.url}/health"))["code"] == 503


@pytest.mark.parametrize("status", [500, 504], ids=["a pass fails", "too late"])
def test_a_stream_never_just_ends(few, hasty, http, status):
    """OpenAI's client takes a stream that ends without a word for a whole answer. A dead engine: above; a server's end: below."""
    running, fault = few if status == 500 else hasty
    fault.plant(PASS)
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "ignore_eos": True,
        "stream": True,
        "n": 2,
    }
    with http.stream("POST", f"{running.url}/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        begun = read(lines, 1)
        if status == 500:
            fault.plant("once")
        *chunks, last = events([*begun, *lines])
    assert not any("error" in chunk for chunk in chunks)
    assert last["error"]["code"] == status and last["error"]["message"]


def test_a_reader_that_stalls_holds_up_nobody(many, http, at_once, wait_idle):
    """It asks for megabytes and does not read them. Others are served, its answer is computed to its end, and kept for it."""
    running, _ = many
    expected = text_of(post(http, running))
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", running.port))
        stalled.settimeout(HANG)
        body = LONG | {
            "max_tokens": 190,
            "prompt": [[index] for index in range(12)],
            "logprobs": 20,
            "stream": True,
        }
        stalled.sendall(post_bytes(body))
        answers = [at_once(running.url, SHORT) for _ in range(8)]
        assert [text_of(answer.result()) for answer in answers] == [expected] * 8
        wait_idle(running.url)
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n"):
            received += stalled.recv(2**16)
    assert len(received) > 2**20
    finished = [line for line in received.splitlines() if b'"finish_reason":"length"' in line]
    assert len(finished) == 12 and received.count(b"data: [DONE]") == 1


def test_connections_that_say_nothing_hold_up_nobody(many, http, at_once):
    running, _ = many
    with ExitStack() as stack:
        for number in range(200):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            if number % 2:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: ")
        answers = [at_once(running.url, SHORT) for _ in range(8)]
        assert [answer.result().status_code for answer in answers] == [200] * 8


# ---- the end --------------------------------------------------------------------------------------------------------


def test_what_does_not_end_within_the_grace_is_told(start, http, at_once, metrics):
    running, fault = start("--grace", "0.3", "--max-sequences", "2")
    fault.plant("0.1")
    answers = [at_once(running.url, LONG | {"stream": number == 0}) for number in range(4)]
    until(lambda: in_hand(metrics(running.url)) == 4)
    running.process.terminate()
    stream, *whole = [answer.result() for answer in answers]
    last = events(stream.text.splitlines())[-1]["error"]
    assert last["code"] == 503 and "shutting down" in last["message"]
    for answer in whole:
        assert answer.status_code == 503 and "shutting down" in error_of(answer)["message"]
    assert running.process.wait(HANG) == -signal.SIGTERM


def test_what_is_in_hand_ends_before_the_server_does_and_a_second_ctrl_c_ends_what_is_left(
    interruptible, start, http
):
    """The first Ctrl-C lets both answers go on, and one of them ends; with the second somebody has lost patience."""
    running, fault = start("--grace", "3600")
    fault.plant(PASS)
    with ExitStack() as stack:

        def ask(**fields):
            body = LONG | {"stream": True, **fields}
            return stack.enter_context(
                http.stream("POST", f"{running.url}/v1/completions", json=body)
            ).iter_lines()

        page = stack.enter_context(
            http.stream("GET", f"{running.url}/live")
        )  # somebody looks on: nobody waits for that
        assert page.status_code == 200
        ends, lasts = ask(max_tokens=20), ask()
        begun = read(ends, 3)
        running.process.send_signal(signal.SIGINT)
        until(lambda: http.get(f"{running.url}/health").json() == {"status": "draining"})
        refused = post(http, running)
        assert (
            refused.status_code == 503
            and refused.headers["retry-after"]
            and "shutting down" in refused.text
        )
        assert events([*begun, *ends])[-1]["choices"][0]["finish_reason"] == "length"
        running.process.send_signal(signal.SIGINT)
        *chunks, last = events(lasts)
    assert last["error"]["code"] == 503 and "shutting down" in last["error"]["message"]
    assert 6 <= len(chunks) < 200 and not any("error" in chunk for chunk in chunks)
    assert running.process.wait(HANG) == 130
    assert "Traceback" not in running.stderr(), running.stderr()
