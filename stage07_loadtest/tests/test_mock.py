"""The mock: it says what a server says, at the moments that it was told, fails in the ways that it was told, and counts exactly.

How long things really take is asked nowhere here but as "not earlier than": the times are checked on a clock that the test turns.
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

from shared.errors import UserError
from stage07_loadtest import mock
from stage07_loadtest.mock import FAULTS, MODEL, Answer, Behaviour, Mock
from stage07_loadtest.tests import virtual

QUICK: dict[str, Any] = {"ttft": 0.002, "itl": 0.001}
BODY = {
    "model": MODEL, "prompt": [7, 8, 9], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
DONE = "data: [DONE]"


async def complete(
    session: aiohttp.ClientSession, server: Mock, **fields: Any
) -> tuple[int, list[str]]:
    """The status, and the lines of an answer that are not empty."""
    async with session.post(f"{server.url}/v1/completions", json=BODY | fields) as answer:
        return answer.status, [line for line in (await answer.text()).splitlines() if line]


async def numbers(session: aiohttp.ClientSession, server: Mock) -> dict[str, float]:
    """What /metrics says, without what is 0."""
    async with session.get(f"{server.url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    return {
        " ".join([sample.name.removeprefix("vllm:"), *sample.labels.values()]).removesuffix(
            f" {MODEL}"
        ): sample.value
        for family in families
        for sample in family.samples
        if sample.value and not sample.name.endswith("_created")
    }


def events(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != DONE]


def with_mock(behaviour: Behaviour, use: Any) -> Any:
    """Run `use(session, server)` against a mock in this process."""

    async def run() -> Any:
        async with mock.serving(behaviour) as server, aiohttp.ClientSession() as session:
            return await use(session, server)

    return virtual.run(run())


# ---- when ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "work", "due"),
    [
        (0, 9.5, 9.5),  # done before the first freeze
        (0, 10, 10),  # just so
        (0, 10.5, 12.5),  # over one
        (9, 3, 14),
        (10, 1, 13),  # it came as the freeze began
        (11, 1, 13),  # in the middle of it
        (12, 1, 13),  # as it ended
        (13, 1, 14),
        (5, 20, 29),  # over two: 5 of work, 2 frozen, 8 of work, 2 frozen, 7 of work
        (21.5, 0, 22),  # what is there at once is not sent by a server that is frozen
    ],
)
def test_a_frozen_server_does_no_work(start, work, due):
    assert Behaviour(stall=2, stall_every=10).due(start, work) == due


def test_the_end_of_work_is_where_a_count_of_the_seconds_finds_it():
    behaviour = Behaviour(stall=3, stall_every=7)

    def counted(start: int, work: int) -> int:
        now = start
        while work:
            work -= not (now >= 7 and now % 7 < 3)  # this second is worked in
            now += 1
        return now

    for start in range(40):
        for work in range(1, 40):
            assert behaviour.due(start, work) == counted(start, work), (start, work)


def paced(behaviour: Behaviour, count: int, late: float = 0.0) -> list[tuple[float, int]]:
    """(moment, tokens) of each chunk of an answer that begins at 0, on a machine that is always `late` seconds late."""
    loop = virtual.new_loop(late)

    async def run() -> list[tuple[float, int]]:
        server = Mock(behaviour)
        server.first = 0.0
        return [
            (loop.time(), tokens)
            async for tokens in server._paced(Answer("", 1, count, count, None, "length"))
        ]

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def test_a_machine_that_is_late_does_not_make_the_next_token_later():
    """Catches a mock that sleeps for `itl` after each token: what it is late by would add up, and it would not be known."""
    moments = [moment for moment, _ in paced(Behaviour(ttft=0.5, itl=0.02), 50, late=0.004)]
    assert moments == pytest.approx([0.5 + 0.02 * number + 0.004 for number in range(50)], abs=1e-6)


def test_tokens_of_one_chunk_are_sent_when_the_last_is_due():
    assert paced(Behaviour(ttft=1, itl=0.5, chunk_tokens=3), 7) == [
        (pytest.approx(2.0), 3), (pytest.approx(3.5), 3), (pytest.approx(4.0), 1)
    ]  # fmt: skip


def test_a_freeze_holds_the_tokens_back_that_were_to_come_in_it():
    moments = [moment for moment, _ in paced(Behaviour(ttft=1, itl=1, stall=2.5, stall_every=4), 5)]
    assert moments == pytest.approx([1, 2, 3, 4, 7.5])


def test_nothing_is_sent_before_its_time():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with session.post(f"{server.url}/v1/completions", json=BODY) as answer:
            arrived = [loop.time() - started async for line in answer.content if b'"text"' in line]
        assert len(arrived) == 6
        assert all(
            moment >= 0.05 + 0.02 * number - 1e-3 for number, moment in enumerate(arrived)
        ), arrived

    with_mock(Behaviour(ttft=0.05, itl=0.02), use)


# ---- what ---------------------------------------------------------------------------------------------------------


def test_a_stream_has_what_a_load_test_reads():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        status, lines = await complete(session, server)
        assert status == 200 and lines[-1] == DONE and lines.count(DONE) == 1
        *chunks, last = events(lines)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
        assert all(
            chunk["choices"][0]["text"] and "token_ids" not in chunk["choices"][0]
            for chunk in chunks
        )
        assert last["choices"] == [] and last["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
        }
        assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
        assert server.bodies[0] == BODY

        _, plain = await complete(session, server, stream_options=None, prompt="Zoë")
        assert all(event["choices"] for event in events(plain)), "nobody asked for the usage"
        _, (whole,) = await complete(
            session, server, stream=False, stream_options=None, prompt="Zoë"
        )
        assert json.loads(whole)["usage"] == {
            "prompt_tokens": 4,
            "completion_tokens": 6,
            "total_tokens": 10,
        }
        assert json.loads(whole)["choices"][0]["finish_reason"] == "length"

    with_mock(Behaviour(**QUICK), use)


def test_token_ids_are_told_to_who_asks_for_them_chunk_by_chunk():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        _, lines = await complete(session, server, return_token_ids=True)
        *chunks, last = events(lines)
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[0, 1, 2, 3], [4, 5]]
        assert last["usage"]["completion_tokens"] == 6

    with_mock(Behaviour(**QUICK, chunk_tokens=4), use)


def test_an_answer_is_shorter_if_nobody_says_that_its_end_does_not_count():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        _, lines = await complete(session, server, ignore_eos=False)
        *chunks, last = events(lines)
        assert (
            last["usage"]["completion_tokens"] == len(chunks) == 3
            and chunks[-1]["choices"][0]["finish_reason"] == "stop"
        )
        assert (await numbers(session, server))["request_success_total stop"] == 1

    with_mock(Behaviour(**QUICK), use)


def test_the_counters_are_exact():
    async def use(session: aiohttp.ClientSession, server: Mock) -> dict[str, float]:
        await asyncio.gather(
            *(complete(session, server, max_tokens=1 + index) for index in range(20))
        )
        return await numbers(session, server)

    counted = with_mock(Behaviour(**QUICK, chunk_tokens=3), use)
    assert counted == {
        "prompt_tokens_total": 60,
        "generation_tokens_total": 210,
        "request_success_total length": 20,
    }


def test_slots_are_shared_in_turn_and_the_others_wait():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        await asyncio.gather(*(complete(session, server) for _ in range(9)))
        assert (server.most_running, server.most_waiting) == (4, 5)
        assert not (server.running or server.waiting or server.held)

    with_mock(Behaviour(**QUICK, slots=4), use)


# ---- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503, 504])
def test_a_status_is_an_answer_with_an_error_object_and_runs_nothing(status):
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        async with session.post(f"{server.url}/v1/completions", json=BODY) as answer:
            assert answer.status == (await answer.json())["error"]["code"] == status
            assert ("Retry-After" in answer.headers) == (status == 503)
        assert await numbers(session, server) == {}

    with_mock(Behaviour(fault=str(status)), use)


def test_nobody_listens_where_everybody_is_refused():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        with pytest.raises(aiohttp.ClientConnectorError):
            await complete(session, server)

    with_mock(Behaviour(fault="refused"), use)


def test_a_reset_loses_the_connection_after_half_of_the_tokens():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
            await complete(session, server)
        counted = await numbers(session, server)
        assert counted == {
            "prompt_tokens_total": 3,
            "generation_tokens_total": 3,
            "request_success_total error": 1,
        }

    with_mock(Behaviour(**QUICK, fault="reset"), use)


def test_a_request_that_hangs_is_given_up_when_its_client_goes():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        async with session.post(f"{server.url}/v1/completions", json=BODY) as answer:
            for _ in range(3):
                assert b'"text"' in await answer.content.readline()
                await answer.content.readline()
            assert (await numbers(session, server))["num_requests_running"] == 1
            answer.close()
        while server.running:
            await asyncio.sleep(0.001)
        counted = await numbers(session, server)
        assert counted == {
            "prompt_tokens_total": 3,
            "generation_tokens_total": 3,
            "request_success_total abort": 1,
        }

    with_mock(Behaviour(**QUICK, fault="hang"), use)


@pytest.mark.parametrize(
    ("fault", "chunks", "finished", "counts", "done"),
    [
        (None, 6, True, True, True),
        ("cut", 3, False, False, False),
        ("no_finish", 6, False, True, True),
        ("no_done", 6, True, True, False),
        ("no_usage", 6, True, False, True),
        ("wrong_count", 5, True, True, True),
    ],
)
def test_a_stream_lacks_what_its_fault_takes_away(fault, chunks, finished, counts, done):
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        status, lines = await complete(session, server)
        found = events(lines)
        choices = [event["choices"][0] for event in found if event["choices"]]
        assert status == 200 and len(choices) == chunks
        assert any(choice["finish_reason"] for choice in choices) == finished
        assert [event["usage"]["completion_tokens"] for event in found if "usage" in event] == [
            chunks
        ] * counts
        assert (DONE in lines) == done
        assert (await numbers(session, server))["generation_tokens_total"] == chunks

    with_mock(Behaviour(**QUICK, fault=fault), use)


def test_an_error_event_stands_behind_a_status_of_200():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        status, lines = await complete(session, server)
        *chunks, last = events(lines)
        assert (
            status == 200
            and len(chunks) == 3
            and last["error"]["code"] == 500
            and lines[-1] == DONE
        )

    with_mock(Behaviour(**QUICK, fault="error_event"), use)


def test_garbage_is_no_json():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        _, lines = await complete(session, server)
        with pytest.raises(json.JSONDecodeError):
            events(lines)

    with_mock(Behaviour(**QUICK, fault="garbage"), use)


def test_a_wrong_counter_and_a_leak_show_in_the_numbers_only():
    async def use(
        session: aiohttp.ClientSession, server: Mock
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        _, lines = await complete(session, server)
        return [event.get("usage", event["choices"]) for event in events(lines)], await numbers(
            session, server
        )

    said, right = with_mock(Behaviour(**QUICK), use)
    also_said, counted = with_mock(Behaviour(**QUICK, fault="wrong_counter"), use)
    assert also_said == said and counted == right | {"generation_tokens_total": 7}
    also_said, leaked = with_mock(Behaviour(**QUICK, fault="leak"), use)
    assert also_said == said and leaked.pop("kv_cache_usage_perc") > 0 and leaked == right


def test_only_each_third_request_fails():
    async def use(session: aiohttp.ClientSession, server: Mock) -> list[int]:
        return [(await complete(session, server))[0] for _ in range(7)]

    assert with_mock(Behaviour(**QUICK, fault="503", fault_every=3), use) == [
        200,
        200,
        503,
        200,
        200,
        503,
        200,
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []}, {"prompt": ""}, {"prompt": None}, {"prompt": 3}, {"max_tokens": 0}, {"max_tokens": "many"},
        {"max_tokens": None},
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_answered_is_refused(fields):
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        status, lines = await complete(session, server, **fields)
        assert (
            status == 400
            and json.loads("".join(lines))["error"]["code"] == 400
            and not server.requests
        )

    with_mock(Behaviour(), use)


def test_a_key_is_asked_for():
    async def use(session: aiohttp.ClientSession, server: Mock) -> None:
        assert (await complete(session, server))[0] == 401
        session.headers["Authorization"] = "Bearer secret"
        assert (await complete(session, server))[0] == 200

    with_mock(Behaviour(**QUICK, api_key="secret"), use)


# ---- the program --------------------------------------------------------------------------------------------------


def test_the_official_client_can_read_it():
    with (
        mock.process("--ttft", "0.002", "--itl", "0.001") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        (model,) = client.models.list().data
        chunks = list(
            client.completions.create(
                model=model.id, prompt=[1, 2], max_tokens=4, stream=True, stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        )  # fmt: skip
        assert (
            chunks[-1].usage is not None
            and chunks[-1].usage.completion_tokens == len(chunks) - 1 == 4
        )


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--stall", "1"], "--stall-every"),
        (["--stall-every", "1"], "--stall"),
        (["--stall", "2", "--stall-every", "2"], "shorter"),
        (["--fault", "sleep"], "choose from"),
        (["--fault", "refused", "--fault-every", "2"], "--fault-every"),
        (["--ttft", "-1"], "--ttft"),
        (["--slots", "0"], "--slots"),
    ],
)
def test_options_that_cannot_be_are_refused_with_a_hint(arguments, hint):
    with pytest.raises(UserError, match=hint):
        mock.main(["--port", "0", *arguments])


def test_a_port_that_is_taken_is_said_and_the_program_ends():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"Port {port} on 127.0.0.1 cannot be opened .*: choose another --port"
        ):
            mock.main(["--port", str(port)])


def test_all_faults_are_explained():
    assert all(
        f"{name}: {about}" in " ".join(mock.parser().format_help().split())
        for name, about in FAULTS.items()
    )
    assert set(mock.IN_THE_MIDDLE) | set(mock.STATUSES) <= set(FAULTS)
