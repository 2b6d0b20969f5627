"""Streams through the router and through Ray.

relay_seconds()     of processor for each event that is passed on, events a second, and the
                    delay of the first event
deaths()            how each stream beside a death ended, and how long after it
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from statistics import median
from typing import Any

import httpx2
import psutil

from shared.server import READY, OwnServer, free_ports, own_server
from stage07_loadtest import mock

PATH = "/v1/completions"
PROMPT = "Once upon a time there was a fox who could not sleep. "
TOKENS = 100  # of a stream beside a death, or on Ray
ROUNDS, STREAMS = 5, 4  # on Ray: how often, and how many at a time
LIMIT = 120.0  # seconds for an answer
ITL = 0.002  # seconds between two events of a server without a model
FIRSTS = 40  # streams whose first events are timed


def router(*arguments: str) -> AbstractContextManager[OwnServer]:
    """The router in a process of its own."""
    return own_server(arguments, True, module="stage12_distributed.router.app")


def events(
    url: str,
    count: int,
    prompt: str = PROMPT,
    begun: Callable[[httpx2.Response], object] = bool,
    **more: str,
) -> Iterator[dict[str, Any]]:
    """The events of a stream of `count` tokens, without [DONE]. Raises httpx2's errors.

    begun: called with the answer before its first event. more: fields of the request.
    """
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": count, "stream": True}
    fields |= {"ignore_eos": True, "temperature": 0, **more}
    with httpx2.stream("POST", url + PATH, json=fields, timeout=LIMIT, trust_env=False) as answer:
        answer.raise_for_status()
        begun(answer)
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


@contextmanager
def before(backends: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The router in front of these servers: its URL and process."""
    with router(*(word for url in backends for word in ("--backend", url))) as server:
        yield server.url, server.pid


def relay_seconds(
    front: Callable[[Sequence[str]], AbstractContextManager[tuple[str, int]]] = before,
    count: int = 2000,
) -> tuple[float, float, float]:
    """Processor seconds that a router takes for an event of one stream, events a second, and the
    seconds by which it delays the first event. The replica has no model: it sends an event every
    ITL seconds."""
    with (
        mock.process("--ttft", "0.01", "--itl", str(ITL)) as backend,
        front([backend]) as (url, pid),
    ):
        list(events(url, 100, model=mock.MODEL))
        router_process = psutil.Process(pid)
        used, started = router_process.cpu_times(), time.perf_counter()
        got = len(list(events(url, count, model=mock.MODEL)))
        seconds, now = time.perf_counter() - started, router_process.cpu_times()
        cost = (now.user + now.system - used.user - used.system) / got
        pairs = [(first_seconds(url), first_seconds(backend)) for _ in range(FIRSTS)]
        through, direct = (median(times) for times in zip(*pairs, strict=True))
        return cost, got / seconds, through - direct


def first_seconds(url: str) -> float:
    """Seconds to the first event of a short stream."""
    started, stream = time.perf_counter(), events(url, 2, model=mock.MODEL)
    next(stream)
    seconds = time.perf_counter() - started
    list(stream)
    return seconds


@dataclass(frozen=True)
class Ended:
    """A stream beside a death.

    how: "whole", "error", or "lost" if it just ended. there: it was on the replica that died.
    seconds: from the death to its end.
    """

    text: str
    how: str
    there: bool
    seconds: float


def prompt(number: int) -> str:
    """The prompt of a stream beside a death."""
    return f"{number} {PROMPT}"


def deaths(server: OwnServer, kills: int, streams: int = 8) -> Iterator[list[Ended]]:
    """Repeat `kills` times: when `streams` streams have begun, kill the oldest of the router's
    replicas that serve one. Yields how each stream ended. Killed replicas start again meanwhile:
    each round waits until two are ready."""
    for _ in range(kills):
        wait_for(f"{server.url}/health", two_ready)
        servers, names = processes(server), SimpleQueue[str]()

        def follow(number: int, names: SimpleQueue[str] = names) -> tuple[str, str, str, float]:
            replica, text, how = "", "", "lost"

            def begun(answer: httpx2.Response) -> None:
                nonlocal replica
                replica = answer.headers["x-replica"]
                names.put(replica)

            for event in events(server.url, TOKENS, prompt(number), begun):
                if "error" in event:
                    how = "error"
                    continue
                text += event["choices"][0]["text"]
                if event["choices"][0]["finish_reason"]:
                    how = "whole"
            return replica, text, how, time.perf_counter()

        with ThreadPoolExecutor(streams) as pool:
            following = [pool.submit(follow, number) for number in range(streams)]
            running = {names.get(timeout=LIMIT) for _ in following}
            dead = next(name for name in servers if name in running)
            servers[dead].kill()
            killed = time.perf_counter()
            ended = [stream.result() for stream in following]
        yield [Ended(text, how, name == dead, end - killed) for name, text, how, end in ended]


def two_ready(answer: httpx2.Response) -> bool:
    return sum(about["ready"] for about in answer.json()["replicas"].values()) >= 2


def processes(server: OwnServer) -> dict[str, psutil.Process]:
    """The processes of a router's replicas by name, the oldest first. The log has their ports."""
    servers = {}
    lines = [line for line in server.stderr().splitlines() if f"] {READY}" in line]
    ports = {line.rpartition(":")[2]: line[1:].partition("]")[0] for line in lines}
    for child in psutil.Process(server.pid).children():
        with suppress(psutil.Error):  # it has just ended
            for connection in child.net_connections():
                if name := ports.get(str(connection.laddr.port)):
                    servers[name] = child
    return dict(sorted(servers.items(), key=lambda pair: pair[1].create_time()))


def ray_seconds() -> dict[str, list[tuple[float, float]]]:
    """Seconds to the first event and for each event after it, for both ways to the replicas on Ray,
    with several streams at a time. Raises UserError without Ray."""
    from ..router import serve

    direct, proxy = free_ports(2)
    ways = {"direct": direct, "proxy": proxy}
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}

    def follow(port: int) -> tuple[float, float]:
        started, times = time.perf_counter(), []
        for _ in events(f"http://127.0.0.1:{port}", TOKENS):
            times.append(time.perf_counter())
        return times[0] - started, (times[-1] - times[0]) / (len(times) - 1)

    try:
        serve.start(1, direct, proxy, [])
        wait_for(f"http://127.0.0.1:{direct}/ready")
        with ThreadPoolExecutor(STREAMS) as pool:
            for number in range(ROUNDS + 1):
                for way, port in ways.items():
                    times = list(pool.map(follow, [port] * STREAMS))
                    if number:  # the first warms both up
                        seconds[way] += times
    finally:
        serve.stop()
    return seconds


def wait_for(url: str, good: Callable[[httpx2.Response], bool] = bool) -> None:
    """Wait until `url` answers with status 200 and `good` holds for the answer; by default the
    status is enough. Raises TimeoutError after LIMIT seconds."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with suppress(httpx2.TransportError):
            answer = httpx2.get(url, trust_env=False)
            if answer.status_code == 200 and good(answer):
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url} was not ready after {LIMIT:g} s")
