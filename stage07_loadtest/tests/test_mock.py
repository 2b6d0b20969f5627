"""The mock: its pace, its counters, and its faults. What its faults do to a client: test_client.

Times are checked on a clock that the test turns; real time only as "not earlier than".
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pytest import approx

from shared.errors import UserError
from stage07_loadtest import mock
from stage07_loadtest.mock import MODEL, Answer, Behaviour, Mock
from stage07_loadtest.tests import virtual

QUICK: dict[str, Any] = {"ttft": 0.002, "itl": 0.001}
BODY = {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 6, "ignore_eos": True, "stream": True}
BODY |= {"stream_options": {"include_usage": True}}


async def complete(
    session: aiohttp.ClientSession, server: Mock, **fields: Any
) -> tuple[int, list[dict[str, Any]]]:
    """The status, and the events of a stream or the whole answer."""
    async with session.post(f"{server.url}/v1/completions", json=BODY | fields) as answer:
        lines = [line for line in (await answer.text()).splitlines() if line]
        if answer.content_type == "text/event-stream":
            assert lines.pop() == "data: [DONE]"
        return answer.status, [json.loads(line.removeprefix("data: ")) for line in lines]


async def numbers(session: aiohttp.ClientSession, server: Mock) -> dict[str, float]:
    """The values of /metrics that are not 0."""
    async with session.get(f"{server.url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = [sample for family in families for sample in family.samples if sample.value]
    return {
        f"{sample.name[5:]} {sample.labels.get('finished_reason', '')}".strip(): sample.value
        for sample in samples
        if not sample.name.endswith("_created")
    }


def with_mock(behaviour: Behaviour, use: Any) -> Any:
    """Run `use(session, server)` against a mock in this process."""

    async def run() -> Any:
        async with mock.serving(behaviour) as server, aiohttp.ClientSession() as session:
            return await use(session, server)

    return virtual.run(run())


# ---- when


def test_a_frozen_server_does_no_work():
    assert Behaviour(stall=2, stall_every=10).due(21.5, 0) == 22  # nothing is sent while frozen
    behaviour = Behaviour(stall=3, stall_every=7)

    def counted(start: int, work: int) -> int:
        """The end of the work, second by second."""
        now = start
        while work:
            work -= not (now >= 7 and now % 7 < 3)
            now += 1
        return now

    for start in range(40):
        for work in range(1, 40):
            assert behaviour.due(start, work) == counted(start, work), (start, work)


def paced(count: int, late: float = 0.0, **behaviour: Any) -> list[tuple[float, int]]:
    """(time, tokens) of every chunk of an answer that starts at 0, on a machine that is always
    `late` seconds late."""
    loop = virtual.new_loop(late)

    async def run() -> list[tuple[float, int]]:
        server = Mock(Behaviour(**behaviour))
        server.first = 0.0
        answer = Answer("", 1, count, None, "length")
        return [(loop.time(), tokens) async for tokens in server._paced(answer)]

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def test_the_pace_of_an_answer():
    moments = [at for at, _ in paced(50, late=0.004, ttft=0.5, itl=0.02)]
    due = [0.5 + 0.02 * number for number in range(50)]
    assert moments == approx([at + 0.004 for at in due], abs=1e-6), "delays add up"
    bundled = paced(7, ttft=1, itl=0.5, chunk_tokens=3)  # sent when the last token is due
    assert bundled == [(approx(2.0), 3), (approx(3.5), 3), (approx(4.0), 1)]
    frozen = [at for at, _ in paced(5, ttft=1, itl=1, stall=2.5, stall_every=4)]
    assert frozen == approx([1, 2, 3, 4, 7.5])


# ---- what


@pytest.mark.parametrize(
    ("fields", "tokens", "reason", "total"),
    [
        ({"return_token_ids": True}, [[0, 1, 2, 3], [4, 5]], "length", 9),
        ({"prompt": "Zoë", "ignore_eos": False}, [None], "stop", 7),
    ],
)
def test_a_stream_has_what_a_load_test_reads(fields, tokens, reason, total):
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        status, (*chunks, last) = await complete(session, server, **fields)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert status == 200 and [choice.get("token_ids") for choice in choices] == tokens
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == reason and all(choice["text"] for choice in choices)
        assert last["choices"] == [] and last["usage"]["total_tokens"] == total
        assert len({event["id"] for event in (*chunks, last)}) == 1
        assert server.bodies[0] == BODY | fields
        _, plain = await complete(session, server, **fields, stream_options=None)
        assert all(event["choices"] for event in plain), "usage only on request"
        _, (whole,) = await complete(session, server, **fields, stream=False)
        assert whole["usage"] == last["usage"]
        assert whole["choices"][0]["finish_reason"] == reason

    with_mock(Behaviour(**QUICK, chunk_tokens=4), use)


def test_the_counters_are_exact_and_slots_limit_what_runs():
    async def use(session: aiohttp.ClientSession, server: Mock) -> dict[str, float]:
        await asyncio.gather(*(complete(session, server, max_tokens=1 + i) for i in range(20)))
        assert (server.most_running, server.most_waiting) == (4, 16)
        assert not (server.running or server.waiting or server.held)
        return await numbers(session, server)

    assert with_mock(Behaviour(**QUICK, slots=4, chunk_tokens=3), use) == {
        "prompt_tokens_total": 60,
        "generation_tokens_total": 210,
        "request_success_total length": 20,
    }


# ---- faults


@pytest.mark.parametrize(
    ("fault", "tokens", "reason", "more"),
    [
        (None, 6, "length", {}),
        ("503", 0, "", {}),
        ("reset", 3, "error", {}),
        ("hang", 3, "abort", {}),
        ("wrong_count", 5, "length", {}),
        ("wrong_counter", 7, "length", {}),
        ("leak", 6, "length", {"kv_cache_usage_perc": approx(9 / 2**16)}),
    ],
)
def test_the_counters_of_a_faulty_server(fault, tokens, reason, more):
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        try:
            async with asyncio.timeout(0.5):
                await complete(session, server)
        except (aiohttp.ClientError, TimeoutError):
            assert fault in ("reset", "hang")
        while server.running:
            await asyncio.sleep(0.001)
        counts = {"prompt_tokens_total": 3, "generation_tokens_total": tokens}
        ended = counts | {f"request_success_total {reason}": 1} | more
        assert await numbers(session, server) == (ended if tokens else {})

    with_mock(Behaviour(**QUICK, fault=fault), use)


INVALID: list[tuple[str, Any]] = [("prompt", []), ("prompt", ""), ("prompt", None), ("prompt", 3)]
INVALID += [("max_tokens", 0), ("max_tokens", "many"), ("max_tokens", None)]


def test_requests_without_a_valid_body_or_key_are_rejected():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        assert (await complete(session, server))[0] == 401
        session.headers["Authorization"] = "Bearer secret"
        for name, value in INVALID:
            status, (body,) = await complete(session, server, **{name: value})
            assert (status, body["error"]["code"]) == (400, 400), (name, value)
        assert server.requests == 0
        assert (await complete(session, server))[0] == 200

    with_mock(Behaviour(**QUICK, api_key="secret"), use)


# ---- the program


def test_the_official_client_can_read_it():
    with (
        mock.process("--ttft", "0.002", "--itl", "0.001") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        (model,) = client.models.list().data
        options: Any = {"prompt": [1, 2], "max_tokens": 4, "extra_body": {"ignore_eos": True}}
        options |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(model=model.id, **options))
        assert chunks[-1].usage.completion_tokens == len(chunks) - 1 == 4


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("--stall 1", "--stall-every"),
        ("--stall-every 1", "--stall"),
        ("--stall 2 --stall-every 2", "shorter"),
        ("--fault sleep", "choose from"),
        ("--fault refused --fault-every 2", "--fault-every"),
        ("--ttft -1", "--ttft"),
        ("--slots 0", "--slots"),
    ],
)
def test_invalid_options_are_rejected_with_a_hint(arguments: str, hint: str):
    with pytest.raises(UserError, match=hint):
        mock.main(["--port", "0", *arguments.split()])


def test_a_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Port {port} .* cannot be opened .* another --port"):
            mock.main(["--port", str(port)])
