"""What the router costs and what a death costs, measured: for this stage's benchmark.

routing_seconds()   of each choice: digests, choose, start, finish
relay_seconds()     of processor for each event that is passed on, and events a second
death_seconds()     from the death of a replica to the end of each stream, and how it ended
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx2
import psutil

from shared.server import OwnServer, python
from stage07_loadtest import mock

from .routing import Routing

PATH = "/v1/completions"
PROMPT = "Once upon a time there was a fox who could not sleep. "
LIMIT = 120.0  # seconds for an answer


def routing_seconds(
    replicas: int = 4, tokens: int = 1024, requests: int = 4000, seed: int = 0
) -> list[float]:
    """Seconds of each of `requests` choices among `replicas`, for prompts of `tokens` tokens, half
    of which some earlier prompt had; a few requests are always in flight."""
    generator, routing = random.Random(seed), Routing(seed=seed)
    for number in range(replicas):
        routing.add(f"replica-{number}")
    starts = [generator.choices(range(50_000), k=tokens // 2) for _ in range(4 * replicas)]
    times, running = [], []
    for _ in range(requests):
        prompt = generator.choice(starts) + generator.choices(range(50_000), k=tokens // 2)
        before = time.perf_counter()
        route = routing.choose(routing.digests(prompt), len(prompt), 64)
        assert route is not None
        routing.start(route)
        running.append(route)
        if len(running) > 8 * replicas:
            routing.finish(running.pop(0))
        times.append(time.perf_counter() - before)
    return times


@contextmanager
def router(*arguments: str) -> Iterator[OwnServer]:
    """The router in a process of its own."""
    command = ["-m", "stage12_distributed", "router", "--port", "0", *arguments]
    with python(command, None) as server:
        server.wait()
        yield server


def events(url: str, count: int, prompt: str = PROMPT) -> Iterator[dict[str, Any]]:
    """The events of a stream of `count` tokens, without [DONE]. Raises httpx2's errors."""
    fields = {"prompt": prompt, "max_tokens": count, "stream": True, "ignore_eos": True}
    asked: dict[str, Any] = {
        "json": fields | {"temperature": 0},
        "timeout": LIMIT,
        "trust_env": False,
    }
    with httpx2.stream("POST", url + PATH, **asked) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def relay_seconds(count: int = 2000, itl: float = 0.002) -> tuple[float, float]:
    """Processor seconds of the router for an event of one stream, and events a second. The replica
    has no model: it sends an event every `itl` seconds."""
    with (
        mock.process("--ttft", "0.01", "--itl", str(itl)) as backend,
        router("--backend", backend) as server,
    ):
        list(events(server.url, 100))
        process = psutil.Process(server.pid)
        before, started = process.cpu_times(), time.perf_counter()
        got = len(list(events(server.url, count)))
        seconds, after = time.perf_counter() - started, process.cpu_times()
        used = after.user + after.system - before.user - before.system
        return used / got, got / seconds


def death_seconds(
    streams: int = 8, tokens: int = 200, arguments: Sequence[str] = ("--threads", "1")
) -> list[tuple[float, str]]:
    """For each of `streams` streams over two replicas, one of which is killed when all have begun:
    seconds from there to its end, and "whole", "error", or "lost" if it just ended."""
    begun, ended = threading.Semaphore(0), []

    def follow(number: int) -> tuple[float, str]:
        how, first = "lost", True
        for event in events(server.url, tokens, f"{number} {PROMPT}"):
            if first:
                begun.release()
            first = False
            if "error" in event:
                how = "error"
            elif event["choices"][0]["finish_reason"]:
                how = "whole"
        return time.perf_counter(), how

    with router("--", *arguments) as server, ThreadPoolExecutor(streams) as pool:
        following = [pool.submit(follow, number) for number in range(streams)]
        for _ in following:
            assert begun.acquire(timeout=LIMIT)
        psutil.Process(server.pid).children()[0].kill()
        killed = time.perf_counter()
        ended = [each.result() for each in following]
    return [(end - killed, how) for end, how in ended]


def ray_seconds(
    rounds: int = 5, streams: int = 4, tokens: int = 100
) -> dict[str, list[tuple[float, float]]]:
    """For both ways to the replicas on Ray, and each of their `streams` streams at a time: seconds
    to the first event, and for each event after it. Raises UserError without Ray."""
    from . import serve

    direct, proxy = free_ports(2)
    ways = {"direct": direct, "proxy": proxy}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}

    def follow(port: int) -> tuple[float, float]:
        started, times = time.perf_counter(), []
        for _ in events(f"http://127.0.0.1:{port}", tokens):
            times.append(time.perf_counter())
        return times[0] - started, (times[-1] - times[0]) / (len(times) - 1)

    try:
        serve.start(1, direct, proxy, [])
        wait_for(f"http://127.0.0.1:{direct}/ready")
        with ThreadPoolExecutor(streams) as pool:
            for number in range(rounds + 1):
                for way, port in ways.items():
                    times = list(pool.map(follow, [port] * streams))
                    if number:  # the first warms both up
                        found[way] += times
    finally:
        serve.stop()
    return found


def wait_for(url: str) -> None:
    """Until it answers with status 200. Raises TimeoutError after LIMIT seconds."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with suppress(httpx2.TransportError):
            if httpx2.get(url, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url} was not ready after {LIMIT:g} s")


def free_ports(count: int) -> list[int]:
    """Ports that no program uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
