"""The mock: its pace and its counters. What its faults do to a client: test_client."""

from __future__ import annotations

import socket
from typing import Any

import openai
import pytest
from pytest import approx

from shared.errors import UserError
from stage07_loadtest import mock, schedule
from stage07_loadtest.load import ServerDelta
from stage07_loadtest.mock import Answer, Behaviour, Mock
from stage07_loadtest.tests import helpers
from stage07_loadtest.tests.helpers import QUICK
from stage07_loadtest.workload import Ask


def test_a_frozen_server_does_no_work() -> None:
    assert Behaviour(stall=2, stall_every=10).due(21.5, 0) == 22  # nothing is sent while frozen
    behaviour = Behaviour(stall=3, stall_every=7)
    for start in range(40):
        for work in range(1, 40):
            now, left = start, work  # second by second
            while left:
                left -= not (now >= 7 and now % 7 < 3)
                now += 1
            assert behaviour.due(start, work) == now, (start, work)


def paced(count: int, late: float = 0.0, **behaviour: Any) -> list[tuple[float, int]]:
    """(time, tokens) of every chunk of an answer that starts at 0, on a machine that is always
    `late` seconds late."""
    loop = helpers.new_loop(late)

    async def run() -> list[tuple[float, int]]:
        server = Mock(Behaviour(**behaviour))
        server.first = 0.0
        answer = Answer("", 1, count, None, "length")
        return [(loop.time(), tokens) async for tokens in server._paced(answer)]

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def test_the_pace_of_an_answer() -> None:
    moments = [at for at, _ in paced(50, late=0.004, ttft=0.5, itl=0.02)]
    due = [0.504 + 0.02 * number for number in range(50)]
    assert moments == approx(due, abs=1e-6), "delays add up"
    bundled = paced(7, ttft=1, itl=0.5, chunk_tokens=3)  # sent when the last token is due
    assert bundled == [(approx(2.0), 3), (approx(3.5), 3), (approx(4.0), 1)]
    frozen = [at for at, _ in paced(5, ttft=1, itl=1, stall=2.5, stall_every=4)]
    assert frozen == approx([1, 2, 3, 4, 7.5])


def test_the_counters_are_exact_and_slots_limit_what_runs() -> None:
    what = [Ask([7, 8, 9], 1 + number) for number in range(20)]
    behaviour = QUICK | {"slots": 4, "chunk_tokens": 3}
    point, server = helpers.against(behaviour, what, schedule.bursts(20, 1, 20))
    assert (server.most_running, server.most_waiting) == (4, 16)
    assert point.server == ServerDelta(60, 210, 20, 0, 0, 0.0)


def test_the_official_client_can_read_it() -> None:
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
        ("--port TAKEN", r"Port \d+ on \S+ cannot be opened \([^(]+\): .* another --port"),
    ],
)
def test_invalid_options_are_rejected_with_a_hint(arguments: str, hint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = f"--port 0 {arguments}".replace("TAKEN", port).split()
        with pytest.raises(UserError, match=hint):
            mock.main(words)
