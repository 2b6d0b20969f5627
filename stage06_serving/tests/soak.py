"""A long mixed load with clients that leave: `python -m stage06_serving.tests.soak`.

It starts a server of its own, and compares its memory, tasks, open files and blocks before and
after the load, when nothing is in flight. During the load it watches tokens/s.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families

from shared import cli
from shared.errors import UserError
from shared.server import own_server

WINDOWS = 10  # of the load; the rate of the last one is compared with that of the first
LEAVING = 0.2  # share of the requests whose client leaves before the end
MOST_GROWTH = 0.02, 20 * 2**20  # of the memory, as a share and in bytes: the larger limit counts
SLOWEST = 0.95  # of the first window's rate
LONG_ENOUGH = 30.0  # seconds of a window: the rates of shorter ones vary too much
PROMPTS = (
    "Once upon a time",
    "Long ago, in a village under the cliffs, there lived a girl whose name was",
    "There was once a merry boy named",
    "The old fox looked at the river, and",
)


@dataclass(frozen=True)
class State:
    """A server with nothing in flight."""

    memory: int  # bytes
    tasks: int  # of the event loop
    files: int  # open, with sockets
    blocks: float  # share that is owned


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    what: str
    before: str
    after: str
    good: bool


async def metrics(client: httpx2.AsyncClient) -> dict[str, float]:
    """The server's metrics by name, summed over labels."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


async def settled(client: httpx2.AsyncClient, pid: int, patience: float = 30.0) -> State:
    """The server's state once nothing is in flight and its connections have closed.

    Raises UserError if that does not happen in time.
    """
    process = psutil.Process(pid)
    deadline, last = time.monotonic() + patience, None
    while time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        values = await metrics(client)
        files = process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
        tasks = int(values["staircase:asyncio_tasks"])
        busy = values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]
        if not busy and last == (files, tasks):
            blocks = values["vllm:kv_cache_usage_perc"]
            return State(process.memory_info().rss, tasks, files, blocks)
        last = (files, tasks)
    raise UserError(
        f"The server was not idle within {patience:g} s: requests or connections were left."
    )


def body_of(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A random path, and a body for it."""
    prompts = chance.sample(PROMPTS, chance.choice((1, 1, 1, 2)))
    body: dict[str, Any] = {
        "max_tokens": chance.randint(1, 64),
        "temperature": chance.choice((0.5, 1.0)),
    }
    body |= {"seed": chance.randrange(1000), "stream": chance.random() < 0.7}
    if chance.random() < 0.2:
        body["stop"] = [".", "the"]
    path = chance.choice(
        ("/v1/completions", "/v1/completions", "/v1/chat/completions", "/generate")
    )
    if path == "/generate":
        return path, body | {"prompt": prompts[0]}
    body["n"] = chance.choice((1, 1, 2, 3))
    if path == "/v1/chat/completions":
        return path, body | {"messages": [{"role": "user", "content": prompts[0]}]}
    return path, body | {
        "prompt": prompts,
        "logprobs": chance.choice((None, 3)),
        "echo": chance.random() < 0.2,
    }


async def client_loop(
    client: httpx2.AsyncClient, chance: random.Random, until: float, counts: dict[str, int]
) -> None:
    """One client: it sends one request after the other, and leaves before some of them end."""
    while time.monotonic() < until:
        path, body = body_of(chance)
        patience = chance.random() * 0.3 if chance.random() < LEAVING else 60.0
        try:
            async with (
                asyncio.timeout(patience),
                client.stream("POST", path, json=body) as response,
            ):
                async for _ in response.aiter_bytes():
                    pass
            counts["answered" if response.status_code == 200 else "refused"] += 1
        except TimeoutError:
            counts["left"] += 1


def judge(
    before: State, after: State, rates: list[float], window: float, refused: int
) -> list[Check]:
    """Compare the states before and after the load. Nothing may be refused: the queue is long."""
    growth = after.memory - before.memory
    megabytes = f"{before.memory / 2**20:.1f}", f"{after.memory / 2**20:.1f}"
    bounded = growth < max(MOST_GROWTH[0] * before.memory, MOST_GROWTH[1])
    blocks = f"{before.blocks:.0%}", f"{after.blocks:.0%}"
    checks = [
        Check("memory, MiB", *megabytes, bounded),
        Check("tasks", str(before.tasks), str(after.tasks), after.tasks <= before.tasks),
        Check("open files", str(before.files), str(after.files), after.files <= before.files),
        Check("blocks owned", *blocks, after.blocks == 0),
        Check("refused requests", "0", str(refused), not refused),
    ]
    if window >= LONG_ENOUGH:
        good = rates[-1] >= SLOWEST * rates[0]
        checks.append(
            Check("tokens/s, first and last window", f"{rates[0]:.1f}", f"{rates[-1]:.1f}", good)
        )
    return checks


async def soak(url: str, pid: int, seconds: float, clients: int, seed: int) -> list[Check]:
    """Load the server at `url` for `seconds` with `clients`; print a line for each window, and
    return the verdict."""
    window = seconds / WINDOWS
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(
        base_url=url, timeout=60, trust_env=False, limits=limits
    ) as client:

        async def load(duration: float, counts: dict[str, int], seed: int) -> None:
            until = time.monotonic() + duration
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    chance = random.Random(f"{seed} {number}")
                    group.create_task(client_loop(client, chance, until, counts))

        counts = {"answered": 0, "left": 0, "refused": 0}
        # First let caches, connections and libraries take the memory that they will keep.
        await load(max(5.0, window), counts, seed + 1)
        before = await settled(client, pid)
        counts = dict.fromkeys(counts, 0)
        print(f"{'window':>8}{'tok/s':>9}{'answered':>10}{'left':>8}{'refused':>9}{'MiB':>9}")
        started, rates = time.monotonic(), []
        tokens = (await metrics(client))["vllm:generation_tokens_total"]
        working = asyncio.create_task(load(seconds, counts, seed))
        for number in range(1, WINDOWS + 1):
            begun = time.monotonic()
            await asyncio.sleep(started + number * window - begun)
            now = (await metrics(client))["vllm:generation_tokens_total"]
            rates.append((now - tokens) / (time.monotonic() - begun))
            tokens = now
            memory = psutil.Process(pid).memory_info().rss / 2**20
            line = f"{number:>8}{rates[-1]:>9.1f}{counts['answered']:>10}{counts['left']:>8}"
            print(f"{line}{counts['refused']:>9}{memory:>9.1f}", flush=True)
        await working
        return judge(before, await settled(client, pid), rates, window, counts["refused"])


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "stage06_serving.tests.soak",
        "Stage 06, a soak: a long mixed load with clients that leave; the server must give "
        "everything back.",
        "  python -m stage06_serving.tests.soak\n"
        "  python -m stage06_serving.tests.soak --minutes 60 --clients 32",
    )
    for option, kind, default, about in (
        ("--minutes", cli.number(0.1, 10_000), 10.0, "how long"),
        ("--clients", cli.whole_number(1, 64), 16, "clients at a time"),
        ("--seed", cli.whole_number(0, 2**31), 0, "seed of the requests"),
    ):
        parser.add_argument(option, type=kind, default=default, metavar="N", help=about)
    options = parser.parse_args(argv)
    with own_server(["--max-queue", "1000"]) as server:
        checks = asyncio.run(
            soak(server.url, server.pid, options.minutes * 60, options.clients, options.seed)
        )
    print(f"\n{'':<32}{'before':>10}{'after':>10}")
    for check in checks:
        verdict = "good" if check.good else "BAD"
        print(f"{check.what:<32}{check.before:>10}{check.after:>10}  {verdict}")
    return 0 if all(check.good for check in checks) else 1


if __name__ == "__main__":
    cli.run(main)
