"""When a request is tried again, under a policy that takes the replicas in turn."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stage12_distributed.router.relay import FULL, Answer, Failed, ForwardedRequest, Relay
from stage12_distributed.router.routing import Replica, Route

REQUEST = ForwardedRequest("POST", "/v1/completions", b"", {})


class Tries(Relay):
    """Replicas whose number is in `bad` fail. This class is also the policy, and a simple one: the
    first one that has not failed the request."""

    def __init__(
        self, count: int, bad: list[int], error: BaseException | None = None, died: bool = False
    ) -> None:
        super().__init__(SimpleNamespace(routing=self), timeout=10.0)  # type: ignore[arg-type]
        self.all, self.bad = [Replica(str(number)) for number in range(count)], bad
        self.died = died
        self.error, self.running = error, 0
        self.seen: list[int] = []
        self.sent: list[Any] = []

    def choose(self, digests: Any, tokens: int, answer: int, without: Any = ()) -> Route | None:
        able = [replica for replica in self.all if replica not in without]
        return Route(able[0], [], 0, 0) if able else None

    def start(self, route: Route) -> None:
        self.running += 1

    def finish(self, route: Route) -> None:
        self.running -= 1

    async def _try(self, request: ForwardedRequest, route: Route, answer: Answer) -> None:
        number = int(route.replica.name)
        assert self.running == 1  # on one replica at a time
        self.seen.append(number)
        if self.error:
            raise self.error
        if number in self.bad:
            raise Failed(503, {}, f"replica {number}".encode(), self.died)
        await answer.send_whole(200, {}, b"an answer")

    def run(self, budget: float = 5.0) -> bytes:
        """The body that the client gets."""

        async def send(message: Any) -> None:
            self.sent.append(message)

        self.budget = budget
        asyncio.run(self._tries(REQUEST, Answer(send)))
        assert self.running == 0
        return bytes(self.sent[-1]["body"])


def test_another_replica_answers_in_place_of_one_that_failed():
    tries = Tries(3, bad=[0])
    assert tries.run() == b"an answer" and tries.seen == [0, 1]
    assert tries.counts["retries"] == 1 and tries.budget == 4.0
    tries = Tries(3, bad=[])
    assert tries.run(budget=0.0) == b"an answer"  # a first try costs nothing
    assert tries.seen == [0] and not tries.counts["retries"] and tries.budget == 0.0


def test_a_request_has_two_tries_and_ends_with_the_last_failure():
    tries = Tries(4, bad=[0, 1, 2])
    assert tries.run() == b"replica 1" and tries.seen == [0, 1]


def test_without_budget_there_is_no_second_try():
    tries = Tries(2, bad=[0])
    assert tries.run(budget=0.9) == b"replica 0" and tries.seen == [0]
    assert tries.budget == 0.9 and not tries.counts["retries"]


def test_a_death_needs_no_budget_and_still_has_one_second_try():
    tries = Tries(3, bad=[0], died=True)
    assert tries.run(budget=0.0) == b"an answer" and tries.seen == [0, 1]
    assert tries.budget == 0.0 and tries.counts["retries"] == 1
    tries = Tries(3, bad=[0, 1], died=True)
    assert tries.run() == b"replica 1" and tries.seen == [0, 1] and tries.budget == 5.0


def test_no_replica_left_is_the_last_failure_and_none_at_all_is_full():
    tries = Tries(1, bad=[0])
    assert tries.run() == b"replica 0" and tries.seen == [0]
    spent = tries.counts["retries"], tries.budget
    assert spent == (0, 5.0), f"no replica was left to retry: (retries, budget) is {spent}"
    tries = Tries(0, bad=[])
    assert FULL.encode() in tries.run() and tries.sent[0]["status"] == 503


def test_what_is_cut_off_is_no_longer_in_flight():
    tries = Tries(2, bad=[], error=TimeoutError())
    with pytest.raises(TimeoutError):
        tries.run()
    assert tries.seen == [0] and tries.running == 0
