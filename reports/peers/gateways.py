"""Our router and two others in front of the same servers, for stage 12's benchmark.

The others are installed into an environment of their own at the first use. All run with their own
defaults, but without a log: each looks for the longest prefix that it has sent to a server.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import httpx2

from shared import measure
from shared.bench import kit
from shared.errors import UserError
from shared.server import free_ports, own_server
from stage07_loadtest.mock import MODEL
from stage12_distributed.bench.streams import PROMPT, before, events, relay_seconds
from stage12_distributed.router.metrics import total

from .install import HOME, Engine, python
from .process import Driver

OURS = "this stage"
OTHERS = {
    "vllm-router": Engine("vllm_router", packages=("vllm-router==0.1.17",)),
    "SGLang's gateway": Engine("sglang_router", packages=("sglang-router==0.3.2",)),
}
STARTING = 60.0  # seconds
WORDS = PROMPT.split()
FOUND, LOOKED = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
Front = Callable[[Sequence[str]], AbstractContextManager[tuple[str, int]]]


@dataclass(frozen=True)
class Chats:
    """Concurrent chats, each asking its questions one after another; a prompt holds all earlier
    questions of its chat. system, question: lengths in words; some chats share their system words.
    answer: length in tokens. Answers are not in the next prompt, because with random weights they
    are no text."""

    chats: int = 12
    systems: int = 4
    questions: int = 4
    system: int = 40
    question: int = 8
    answer: int = 16

    def talk(self, url: str, seed: object) -> tuple[float, list[float]]:
        """Seconds for all chats, and seconds to the first token of each answer."""

        def words(number: int, name: str) -> str:
            return " ".join(random.Random(f"{seed} {name}").choices(WORDS, k=number))

        def chat(number: int) -> list[float]:
            text, times = words(self.system, f"system {number % self.systems}"), []
            for turn in range(self.questions):
                text += " " + words(self.question, f"question {number} {turn}")
                started, answer = time.perf_counter(), events(url, self.answer, text, model=MODEL)
                next(answer)
                times.append(time.perf_counter() - started)
                list(answer)
            return times

        started = time.perf_counter()
        with ThreadPoolExecutor(self.chats) as pool:
            every = list(pool.map(chat, range(self.chats)))
        return time.perf_counter() - started, sum(every, [])


@contextmanager
def other(name: str, backends: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The URL and process of another router. Raises UserError if it cannot be installed, or does
    not start."""
    engine, (port, second) = OTHERS[name], free_ports(2)
    options = {"host": "127.0.0.1", "port": port, "prometheus-port": second, "log-level": "error"}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    module = f"{engine.driver}.launch_router"
    command = [str(python(engine, HOME)), "-m", module, "--policy", "cache_aware", *words]
    command += ["--worker-urls", *backends]
    with Driver(command, engine.environment(1), speaks=False) as running:
        url = f"http://127.0.0.1:{port}"
        running.wait(lambda: answers(url), name, STARTING)
        yield url, running.process.pid


def answers(url: str) -> bool:
    with suppress(httpx2.HTTPError):
        return bool(list(events(url, 1, model=MODEL)))
    return False


def cached(servers: Sequence[str]) -> tuple[float, float]:
    """Tokens that the servers found in their caches, and tokens that they looked for."""
    pages = [httpx2.get(f"{url}/metrics", trust_env=False).text for url in servers]
    hits, looked = (sum(total(page, name) for page in pages) for name in (FOUND, LOOKED))
    return hits, looked


def compare(options: Sequence[str], chats: Chats, repeats: int, relayed: int) -> dict[str, Any]:
    """Two servers of stage 06 with these `options` behind each router in turn: what they find in
    their caches, and how soon they answer. The router's own cost is measured in front of a server
    without a model, over `relayed` events. "missing": why a router is absent."""
    fronts: dict[str, Front] = {OURS: before, **{name: partial(other, name) for name in OTHERS}}
    missing: dict[str, str] = {}
    urls: dict[str, str] = {}
    overheads: dict[str, tuple[float, float, float]] = {}
    seeds = count()

    with ExitStack() as stack:
        named = [*options, "--served-model-name", MODEL]  # that of the server without a model
        servers = [stack.enter_context(own_server(named, quiet=True)).url for _ in range(2)]

        def once(url: str) -> dict[str, float]:
            (earlier, looked), (seconds, first) = cached(servers), chats.talk(url, next(seeds))
            now = cached(servers)
            hits = (now[0] - earlier) / (now[1] - looked)
            return {"seconds": seconds, "found": hits, "first": median(first)}

        for name, front in fronts.items():
            try:
                overheads[name] = relay_seconds(front, relayed)
                urls[name] = stack.enter_context(front(servers))[0]
            except UserError as error:
                missing[name] = str(error)
        ways = {name: partial(once, url) for name, url in urls.items()}
        runs = measure.turns(ways, repeats, warmup=0)
    group = kit.by_variant(runs)
    for place, key in enumerate(("processor", "rate", "added")):
        group[key] = {name: values[place] for name, values in overheads.items()}
    tokens = chats.chats * chats.questions * chats.answer
    return {"tokens": tokens, "missing": missing} | group
