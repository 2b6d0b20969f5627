"""When a request is tried again, under a policy that takes the replicas in turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stage12_distributed.drivers import Fleet
from stage12_distributed.router.relay import FULL, Failed


def failed(number: int, died: bool = False) -> Failed:
    return Failed(503, {}, f"replica {number}".encode(), died)


def tried(fleet: Fleet) -> list[str]:
    """The replicas that had the request: each is in flight from before its try to its end."""
    names = [event[1] for event in fleet.events if event[0] == "try"]
    kinds = [event[:2] for event in fleet.events]
    assert kinds == [(kind, name) for name in names for kind in ("start", "try", "finish")]
    return names


def served(count: int, *ends: Any, budget: float = 5.0) -> tuple[bytes, Fleet]:
    """The body that the client gets of `count` replicas, whose tries end with `ends`."""
    fleet = Fleet(count, ends, budget)
    asyncio.run(fleet.serve())
    return fleet.sent[-1][1], fleet


def test_another_replica_answers_in_place_of_one_that_failed():
    body, fleet = served(3, failed(0), b"an answer")
    assert body == b"an answer" and tried(fleet) == ["0", "1"]
    assert fleet.counts["retries"] == 1 and fleet.budget == 4.0
    body, fleet = served(3, b"an answer", budget=0.0)  # a first try costs nothing
    assert body == b"an answer" and tried(fleet) == ["0"]
    assert not fleet.counts["retries"] and fleet.budget == 0.0


def test_a_request_has_two_tries_and_ends_with_the_last_failure():
    body, fleet = served(4, *map(failed, range(3)))
    assert body == b"replica 1" and tried(fleet) == ["0", "1"]


def test_without_budget_there_is_no_second_try():
    body, fleet = served(2, failed(0), b"an answer", budget=0.9)
    assert body == b"replica 0" and tried(fleet) == ["0"]
    assert fleet.budget == 0.9 and not fleet.counts["retries"]


def test_a_death_needs_no_budget_and_still_has_one_second_try():
    body, fleet = served(3, failed(0, died=True), b"an answer", budget=0.0)
    assert body == b"an answer" and tried(fleet) == ["0", "1"]
    assert fleet.budget == 0.0 and fleet.counts["retries"] == 1
    body, fleet = served(3, *(failed(number, died=True) for number in range(3)))
    assert body == b"replica 1" and tried(fleet) == ["0", "1"] and fleet.budget == 5.0


def test_no_replica_left_is_the_last_failure_and_none_at_all_is_full():
    body, fleet = served(1, failed(0))
    assert body == b"replica 0" and tried(fleet) == ["0"]
    spent = fleet.counts["retries"], fleet.budget
    assert spent == (0, 5.0), f"no replica was left to retry: (retries, budget) is {spent}"
    body, fleet = served(0)
    assert FULL.encode() in body and fleet.sent[0][0] == 503


def test_what_is_cut_off_is_no_longer_in_flight():
    fleet = Fleet(2, [TimeoutError()], 5.0)
    with pytest.raises(TimeoutError):
        asyncio.run(fleet.serve())
    assert tried(fleet) == ["0"]
