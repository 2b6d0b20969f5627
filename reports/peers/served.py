"""Our engine behind HTTP beside another engine's server, many streams at once; and without HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

from shared import server
from shared.bench import kit
from shared.errors import UserError
from shared.parity import random_prompt
from stage07_loadtest import metrics, schedule
from stage07_loadtest.load import load as load_once
from stage07_loadtest.workload import Ask

from .install import ENGINES, HOME, OLDER, OURS, python
from .process import Driver, Failures, started

WHERE = "served"  # for failures
OFFLINE = f"{OURS}, without HTTP"


@dataclass(frozen=True)
class Load:
    """Users who each wait for one answer at a time. Lengths are in tokens."""

    users: int = 32
    requests: int = 64
    prompt: int = 64
    answer: int = 64


@contextmanager
def ours(stage: str, model: str, dtype: str, load: Load) -> Iterator[tuple[str, int]]:
    """Our server's URL and process."""
    engine, users = stage.partition("_")[2], load.users
    options = kit.server_options(model, dtype, users, max_num_seqs=users, engine=engine)
    options.append("--no-enable-prefix-caching")
    with server.own_server(options, quiet=True) as running:
        yield running.url, running.pid


@contextmanager
def vllm(place: Path, dtype: str, threads: int, load: Load) -> Iterator[tuple[str, int]]:
    """vLLM's URL and process. Raises UserError if it does not start."""
    engine = ENGINES["vLLM"]
    (port,) = server.free_ports(1)
    options: dict[str, Any] = {"dtype": dtype, "port": port, "host": "127.0.0.1"}
    options |= {"max-num-seqs": load.users, "max-num-batched-tokens": 4096, "max-model-len": 1024}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    # Not `vllm serve`, which looks for a package called vllm.
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(place), *words]
    runs = python(engine, HOME)
    command = [str(runs), *words, "--no-enable-prefix-caching"]
    with Driver(command, engine.environment(threads), speaks=False) as running:
        url = f"http://127.0.0.1:{port}"
        running.wait(lambda: answers(f"{url}/health"), "its server")
        yield url, running.process.pid


def answers(url: str) -> bool:
    with suppress(OSError), urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def once(url: str, asks: list[Ask], load: Load) -> dict[str, Any]:
    """One run: its seconds. Raises UserError if a request failed."""
    when = schedule.closed(load.users, load.requests)
    point = load_once(url, asks, when, warmup=load.users)
    for record in point.records:
        if not metrics.succeeded(record):
            raise UserError(f"its server failed a request: {record.failure}, {record.detail}")
    return {"seconds": point.duration}


def offline(driver: Driver, asks: list[Ask], load: Load) -> dict[str, Any]:
    """The measured requests, answered by the engine alone, as many at a time as there are users."""
    prompts: list[Any] = [ask.prompt for ask in asks[-load.requests :]]
    starts = range(0, len(prompts), load.users)
    runs = [driver.ask(prompts[at : at + load.users], load.answer) for at in starts]
    return {"seconds": sum(run["seconds"] for run in runs)}


def run(plan: Any, place: Path, dtype: str, failures: Failures) -> kit.Group:
    """All servers in turn: the seconds that all requests took."""
    load, model = plan.load, plan.models[0]
    config = kit.models.presets()[model]
    asks = [
        Ask(random_prompt(load.prompt, config, row), load.answer)
        for row in range(load.users + load.requests)
    ]
    servers: dict[str, Any] = {
        name: partial(ours, name, model, dtype, load) for name in (OURS, OLDER)
    }
    servers["vLLM"] = partial(vllm, place, dtype, torch.get_num_threads(), load)
    ways: dict[str, Any] = {}
    with ExitStack() as stack:
        if OURS in plan.engines:
            with failures.named(OFFLINE, WHERE):
                driver = stack.enter_context(started(OURS, place, dtype))
                driver.ready()
                offline(driver, asks[: load.users], load)  # warms up
                ways[OFFLINE] = partial(offline, driver, asks, load), driver.process.pid
        for name in [name for name in servers if name in plan.engines]:
            with failures.named(name, WHERE):
                url, pid = stack.enter_context(servers[name]())
                ways[name] = partial(once, url, asks, load), pid
        runs = failures.turns(WHERE, ways, plan.rounds[-1], plan.tries)
    about: kit.Group = {"model": model, "dtype": dtype, "users": load.users}
    about["lengths"] = [[load.prompt, load.answer, load.requests]]
    return about | (kit.by_variant(runs) if runs else {"seconds": {}})
