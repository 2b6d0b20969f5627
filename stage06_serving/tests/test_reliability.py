"""A real server: hundreds of clients that leave, what happens from its start to its end, and its
metrics: exact after a scripted run, under vLLM's names, and with fixed labels.

Clients that leave, late answers and failures one by one: test_leaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import struct
from contextlib import ExitStack

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.server import free_ports, python

from .asking import HANG, ended, events, get, post, posted, until, until_idle
from .conftest import environment
from .faulty_server import MODULE, VARIABLE, Fault

LONG = {"prompt": "abcd", "temperature": 0, "ignore_eos": True, "max_tokens": 200}
SHORT = LONG | {"max_tokens": 8}
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")  # each reads its own fields
MIXED = {"messages": [{"role": "user", "content": "abcd"}], "stop": ["never seen"]}
PHASES = ("connected", "header", "body", "sent", "queue", "decode", "last")
ENDS = ("abort", "length", "error")
MOST_GROWTH = 20 * 2**20  # bytes of memory, from the first storm to the last


async def leave(port, phase, streams, chance):
    """Connect, go as far as `phase`, and leave: with an orderly close, or with a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = (SHORT if phase == "last" else LONG) | MIXED | {"stream": streams}
    data = posted(body, chance.choice(PATHS))
    cut = {"connected": 0, "header": data.index(b"\r\n\r\n") // 2, "body": len(data) - 5}
    writer.write(data[: cut.get(phase, len(data))])
    if phase == "queue":
        await asyncio.sleep(chance.random() * 0.2)
    if phase == "decode" and streams:
        for _ in range(chance.randrange(1, 4)):
            await reader.readuntil(b"\n\n")
    if phase == "last":
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"[DONE]\n\n" if streams else b"}}")
    if chance.random() < 0.5:
        linger = struct.pack("ii", 1, 0)
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


@pytest.mark.parametrize("storms", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_storm_of_clients_that_leave(house, tiny_folder, storms):
    """Some stream, some do not, and each leaves at a different moment. Everything is released:
    blocks, tasks of the event loop, open files, and in many storms memory."""
    options = "--max-num-seqs 24 --max-queue 300 --kv-memory 1MiB"
    running = house("--model", str(tiny_folder), *options.split())
    expected, process = post(running, json=SHORT).json()["choices"], psutil.Process(running.pid)
    before, log, chance = until_idle(running), running.stderr(), random.Random(0)
    clients = [(PHASES[number % 7], number // 7 % 2 == 0) for number in range(200)]

    async def one(phase, streams):
        await asyncio.sleep(chance.random())
        await leave(running.port, phase, streams, chance)

    async def storm():
        async with asyncio.timeout(2 * HANG):
            await asyncio.gather(*(one(*client) for client in clients))

    def left():
        """Open files."""
        until_idle(running)
        return process.num_fds()

    at_rest, memory = left(), []
    for _ in range(storms):
        asyncio.run(storm())
        until(lambda: left() <= at_rest)
        memory.append(process.memory_info().rss)
    after = until_idle(running)
    aborted, whole, errors = (ended(after)[end] - ended(before)[end] for end in ENDS)
    last = clients.count(("last", True)) + clients.count(("last", False))
    assert aborted >= storms * clients.count(("decode", True)) and whole >= storms * last
    assert errors == 0 and memory[-1] - memory[0] < MOST_GROWTH
    assert post(running, json=SHORT).json()["choices"] == expected
    assert "Traceback" not in running.stderr().removeprefix(log), running.stderr()


def test_loading_draining_and_hurrying(tmp_path, tiny_folder):
    """/health: the engine works. /ready: it takes requests. The first signal lets answers end, the
    second ends them; slow bodies delay nothing, and no traceback is logged."""
    fault = Fault(tmp_path / "fault")
    fault.plant("loading")
    (port,) = free_ports(1)
    arguments = f"-m {MODULE} --port {port} --linear plain --grace 3600 --model {tiny_folder}"
    variables = environment({VARIABLE: str(fault.file)})
    with ExitStack() as stack:
        running = stack.enter_context(python(arguments.split(), variables))
        running.url = url = f"http://127.0.0.1:{port}"
        http = stack.enter_context(httpx2.Client(base_url=url, trust_env=False, timeout=HANG))

        def answers(path, status):
            with contextlib.suppress(httpx2.TransportError):
                answer = http.get(path)
                return answer.status_code == status and answer.json()

        def ask(**fields):
            body = LONG | {"stream": True, **fields}
            asked = http.stream("POST", "/v1/completions", json=body)
            return filter(None, stack.enter_context(asked).iter_lines())

        def read(lines):
            return events("\n\n".join([*lines, ""]))

        until(lambda: answers("/ready", 503))
        for path in ("/health", "/ready"):
            assert "still loading" in http.get(path).json()["error"]["message"]
        assert "Loading " in running.stderr()
        early = post(running, json=SHORT)
        assert early.headers["retry-after"] and "loading" in early.json()["error"]["message"]
        fault.plant("0.05")  # seconds more for each pass: 200 tokens take ten seconds
        until(lambda: answers("/ready", 200) == {"status": "ok", "waiting": 0, "passes": 0})
        slow = [socket.create_connection(("127.0.0.1", port), timeout=HANG) for _ in range(3)]
        for each in slow:
            stack.enter_context(each).sendall(posted(SHORT)[:-3])
        ends, lasts = ask(max_tokens=20), ask()
        begun = [next(ends) for _ in range(3)]
        running.process.terminate()
        until(lambda: answers("/health", 200) == {"status": "draining"})
        for refused in (post(running, json=SHORT), http.get("/ready")):
            assert refused.status_code == 503 and refused.headers["retry-after"]
        assert read([*begun, *ends])[-1]["choices"][0]["finish_reason"] == "length"
        running.process.terminate()
        *chunks, last = read(lasts)
        assert last["error"]["code"] == 503 and "shutting down" in last["error"]["message"]
        assert 6 <= len(chunks) < 200 and not any("error" in chunk for chunk in chunks)
        assert running.process.wait(HANG) == -signal.SIGTERM
        log = running.stderr()
    assert "Traceback" not in log, log
    assert "Waiting up to 3600 s for 2 sequences in flight: Ctrl-C again ends them" in log


FAMILIES = {  # that vLLM's dashboards ask for
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc",
    "counter": "num_preemptions prefix_cache_queries prefix_cache_hits prompt_tokens "
    "generation_tokens request_success admission_rejections",
    "histogram": "iteration_tokens_total time_to_first_token_seconds inter_token_latency_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds request_prompt_tokens request_generation_tokens",
}
REASONS = {"stop", "length", "abort", "error"}
IDS = list(range(10, 50))  # 40 tokens: two whole blocks and a half


def test_the_counters_are_exact(house, tiny_folder, tmp_path):
    def complete(prompt=IDS, status=200, **fields):
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        answer = post(running, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    fault = Fault(tmp_path / "fault")
    running = house("--model", str(tiny_folder), env={VARIABLE: str(fault.file)})
    before = until_idle(running)
    names = [name for name in before if name.startswith("vllm:") and "_created" not in name]
    assert names and not any(before[name] for name in names)
    complete(max_tokens=8)
    complete(max_tokens=1)  # its first two blocks are found
    complete([7, 8, 9], n=2, temperature=1, seed=1, max_tokens=5)
    answer = complete([3, 4], max_tokens=6, return_token_ids=True)
    assert answer["usage"]["completion_tokens"] == 6
    token = answer["choices"][0]["token_ids"][0]
    answer = complete([3, 4], max_tokens=6, stop_token_ids=[token])
    assert answer["choices"][0]["finish_reason"] == "stop"
    complete([3, 4], max_tokens=-1, status=400)
    complete([3, 400], status=400)
    fault.plant("once")
    failed = complete([5, 6, 7], max_tokens=4, status=500)
    until(lambda: "a planted fault" in running.stderr())
    assert "planted" not in str(failed)
    assert get(running, "/health").status_code == 200
    numbers = until_idle(running)
    assert ended(numbers) == {"length": 5, "stop": 1, "abort": 0, "error": 1}
    answers = [8, 1, 5, 5, 6, 1]  # tokens; the answer that failed has none
    # The probe after the fault is not counted.
    computed = (40 + 7) + 8 + (3 + 1 + 2 * 4) + (2 + 5) + 2
    for name, value in {
        "generation_tokens_total": sum(answers),
        "prefix_cache_hits_total": 32,
        # The second of two samples computes the last token of the prompt again.
        "prompt_tokens_total": 40 + (40 - 32) + 3 + 1 + 2 + 2,
        "iteration_tokens_total_sum": computed,
        "admission_rejections_total": 0,
        "num_preemptions_total": 0,
        "time_to_first_token_seconds_count": len(answers),
        "inter_token_latency_seconds_count": sum(answers) - len(answers),
        "request_queue_time_seconds_count": len(answers),
        "request_prefill_time_seconds_count": len(answers),
        "request_decode_time_seconds_count": len(answers),
        "e2e_request_latency_seconds_count": len(answers) + 1,
        "request_generation_tokens_count": len(answers) + 1,
        "request_generation_tokens_sum": sum(answers),
        "request_prompt_tokens_sum": 40 + 40 + 3 + 3 + 2 + 2 + 3,
    }.items():
        assert numbers[f"vllm:{name}"] == value, name


def test_the_names_are_those_of_vllm_and_nothing_of_a_client_becomes_a_label(server):
    """Otherwise a client could fill the memory with new series, and read what others have asked."""
    word = "a-word-of-the-client"
    fields = {"max_tokens": 2, "user": word, "stop": word, word: word}
    for path, body, status in (
        (f"/v1/completions?{word}", {"prompt": word, **fields}, 200),
        ("/v1/completions", {"prompt": word, "model": word}, 404),
        (f"/{word}", {}, 404),
    ):
        assert post(server, path, json=body, headers={"User-Agent": word}).status_code == status
    answer = get(server, "/metrics")
    kind = answer.headers["content-type"]
    assert kind.startswith("text/plain") and "version=" in kind and word not in answer.text
    families = list(text_string_to_metric_families(answer.text))
    expected = {f"vllm:{name}": kind for kind in FAMILIES for name in FAMILIES[kind].split()}
    assert expected.items() <= {family.name: family.type for family in families}.items()
    labels: dict[str, set[str]] = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    assert labels.keys() == {"model_name", "finished_reason", "le", "status"}
    assert labels["model_name"] == {"stories"} and labels["finished_reason"] == REASONS
    assert len(labels["le"]) < 40 and all(value.isdigit() for value in labels["status"])
