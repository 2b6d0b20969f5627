"""The policy: prefixes against load, and what it knows of replicas that come and go."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage12_distributed.routing import BLOCKS, Replica, Route, Routing

SIZE = 4  # tokens in a block


def fleet(count: int, seed: int = 0, blocks: int = BLOCKS) -> Routing:
    routing = Routing(SIZE, seed=seed)
    for number in range(count):
        routing.add(f"replica-{number}", blocks)
    return routing


def send(routing: Routing, prompt, answer: int = 0) -> Route:
    """A request that is in flight from now on."""
    route = routing.choose(routing.digests(prompt), len(prompt), answer)
    assert route is not None
    routing.start(route)
    return route


def passed(routing: Routing, prompt) -> Route:
    """A request that has ended."""
    route = send(routing, prompt)
    routing.finish(route)
    return route


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def test_a_digest_is_that_of_a_block_and_all_before_it():
    routing, prompt = Routing(SIZE), prompt_of(4 * SIZE + 3)
    digests = routing.digests(prompt)
    assert len(digests) == 4 and digests[:2] == routing.digests(prompt[: 2 * SIZE])
    assert not {*digests} & {*routing.digests([prompt[0] + 1, *prompt[1:]])}


def test_the_longest_cached_prefix_is_found():
    routing, prompt = fleet(2), prompt_of(10 * SIZE)
    short, long = routing.replicas.values()
    short.remember(routing.digests(prompt[: 3 * SIZE]))
    long.remember(routing.digests(prompt[: 7 * SIZE]))
    route = passed(routing, prompt)
    assert route.replica is long and route.cached == 7 * SIZE and route.tokens == 3 * SIZE


def test_the_last_token_is_always_computed():
    routing, prompt = fleet(1), prompt_of(5 * SIZE)
    assert [passed(routing, prompt).cached for _ in range(2)] == [0, 4 * SIZE]
    assert passed(routing, []).cached == 0


def test_a_long_queue_outweighs_a_short_prefix():
    routing, prompt = fleet(2), prompt_of(10 * SIZE)
    first = passed(routing, prompt[:SIZE]).replica
    assert passed(routing, prompt).replica is first
    for tokens, same in ((9 * SIZE - 1, True), (9 * SIZE + 1, False)):
        first.tokens = tokens  # its cached tokens are worth 9 blocks: the last token is computed
        route = routing.choose(routing.digests(prompt), len(prompt))
        assert route is not None and (route.replica is first) == same


@pytest.mark.parametrize("seed", range(5))
def test_one_hot_prefix_does_not_end_affinity_for_all(seed):
    """The price of what waits there sends its requests elsewhere, too; requests with other prefixes
    stay at home."""
    routing = fleet(4, seed)
    homes = {
        number: passed(routing, prompt_of(40 * SIZE, number)).replica for number in range(1, 9)
    }
    hot = prompt_of(100 * SIZE, 0)
    routes = [send(routing, hot + [number] * SIZE, answer=SIZE) for number in range(400)]
    loads = Counter(route.replica for route in routes)
    assert len(loads) == 4 and max(loads.values()) < 2 * min(loads.values()), loads.values()
    for route in routes:
        routing.finish(route)
    for key, home in homes.items():
        replica = passed(routing, prompt_of(40 * SIZE, key)).replica
        assert replica is home, f"{home.name} has prompt {key}, not {replica.name}"


@pytest.mark.parametrize("count", [2, 3, 10, 100])
def test_an_answer_in_flight_does_not_send_the_next_request_away(count):
    """The replica that has the whole prompt gets the next ones too: one request in flight is less
    than a prompt to compute, however idle the others are."""
    for seed in range(20):
        routing, prompt = fleet(count, seed), prompt_of(250 * SIZE)
        home = passed(routing, prompt).replica
        routes = [send(routing, [*prompt, number], answer=16) for number in range(4)]
        assert {route.replica for route in routes} == {home}


def test_a_prompt_that_is_computed_is_no_longer_ahead():
    routing, prompt = fleet(3), prompt_of(100 * SIZE)
    route = send(routing, prompt, answer=16)
    assert route.replica.tokens == 100 * SIZE + 16
    routing.begin(route)
    assert route.replica.tokens == 16 and route.replica.requests == 1
    assert send(routing, prompt, answer=16).replica is route.replica
    routing.finish(route)
    assert route.replica.requests == 1


def test_ties_are_broken_at_random():
    routing, prompt = fleet(8), prompt_of(10 * SIZE)
    for replica in routing.replicas.values():
        replica.remember(routing.digests(prompt))
    counts = Counter(passed(routing, prompt).replica for _ in range(800))
    assert len(counts) == 8 and max(counts.values()) < 150


def test_without_a_prefix_the_less_busy_of_two_is_chosen():
    """Power of two choices, over many seeds, because the order of the draws is free: 160 requests
    to 8 replicas. One random choice leaves the loads about 13 apart, the least busy of all 0."""
    spreads = []
    for seed in range(30):
        routing = fleet(8, seed)
        for number in range(160):
            send(routing, prompt_of(SIZE - 1, number))
        loads = [replica.requests for replica in routing.replicas.values()]
        spreads.append(max(loads) - min(loads))
    spread = mean(spreads)
    assert 1 < spread < 4, f"busiest less idlest replica: 1 to 4 on average, not {spread:.1f}"


def test_a_dead_replica_is_forgotten_with_its_tree():
    routing, prompt = fleet(2), prompt_of(10 * SIZE)
    open_route = send(routing, prompt)
    routing.remove(open_route.replica.name)
    assert passed(routing, prompt).cached == 0
    again = routing.add(open_route.replica.name)
    routing.finish(open_route)
    assert again.requests == again.tokens == 0 and not again.match(routing.digests(prompt))


def test_a_replica_that_is_not_ready_keeps_its_load_and_its_tree():
    routing, prompt = fleet(2), prompt_of(10 * SIZE)
    open_route = send(routing, prompt, answer=8)
    routing.begin(open_route)  # with the prompt cached, it would be the cheapest
    open_route.replica.ready = False
    assert passed(routing, prompt).replica is not open_route.replica
    assert open_route.replica.tokens == 8 and open_route.replica.requests == 1
    open_route.replica.ready = True
    routing.finish(open_route)
    assert passed(routing, prompt).cached == 9 * SIZE


def test_failed_and_absent_replicas_are_not_chosen():
    routing = fleet(0)
    assert routing.choose([], 1) is None
    one = routing.add("one")
    assert routing.choose([], 1, without=[one]) is None
    assert routing.choose([], 1) is not None


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=30),
    st.integers(1, 12),
    st.lists(st.integers(0, 1), max_size=12),
)
def test_searching_by_halves_finds_what_a_walk_finds(chains, blocks, asked):
    routing, replica = Routing(1), Replica("one", blocks)
    for tokens in chains:
        replica.remember(routing.digests(tokens))
        assert len(replica.tree) <= blocks
    digests, walked = routing.digests(asked), 0
    while walked < len(digests) and digests[walked] in replica.tree:
        walked += 1
    assert replica.match(digests) == walked
    assert not any(digest in replica.tree for digest in digests[walked:])
