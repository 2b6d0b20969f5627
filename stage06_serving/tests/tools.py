"""Helpers of the tests: a server in this process, requests to it, and engines on a thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.catalog import STORIES
from shared.tokenizer import Tokenizer
from stage01_forward.engine import Engine as Naive
from stage01_forward.params import SamplingParams
from stage06_serving import __main__ as program
from stage06_serving.app import create_app
from stage06_serving.async_engine import AsyncEngine, Broken, EngineDead, EngineThread, Ticket
from stage06_serving.loading import make_engine
from stage06_serving.settings import parse

HANG = 60.0  # seconds: on an idle machine nothing here takes a tenth of that
PROMPT, OTHER = "Once upon a time", "The old fox looked at the river"
CHAT = [{"role": "user", "content": "Tell me a story."}]
TOKENIZER = Tokenizer.from_folder(STORIES)
GREEDY: dict[str, Any] = {"model": "stories", "temperature": 0}
LARGEST_ERROR = 2048  # bytes
TOKENS = 8  # of an answer by default: the sanitizer checks the memory after every step
IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class House:
    """A server on a thread of this process, so quick to start. `served` has its engine."""

    def __init__(self, *arguments: str) -> None:
        self.settings = parse(["--sanitize", "--engine", "paged", "--grace", "0", *arguments])
        self.thread = EngineThread()
        self.served = self.thread.run(partial(make_engine, self.settings)).result()
        self.app = create_app(self.served, self.settings, self.thread)
        place = program.bind("127.0.0.1", 0)
        self.url, self.port = program.address_of(place), place.getsockname()[1]
        self.server = program.Server(self.app, self.settings.grace)
        serving = self.server.serve(sockets=[place])
        self.work = threading.Thread(target=asyncio.run, args=[serving], daemon=True)
        self.work.start()
        until(lambda: self.server.started)

    @property
    def running(self) -> AsyncEngine:
        engine: AsyncEngine = self.app.state.engine
        return engine

    def gate(self, **options: Any) -> Passes:
        """The passes of its engine, below the scores."""
        return Passes(self.served.engine.runner.runner, **options)

    def stop(self) -> None:
        self.server.should_exit = True
        self.work.join(HANG)

    def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        options = {"trust_env": False, "timeout": HANG} | options
        return httpx2.request(method, self.url + path, **options)

    def post(self, path: str = "/v1/completions", **options: Any) -> httpx2.Response:
        return self.ask("POST", path, **options)

    def numbers(self) -> dict[str, float]:
        """Metrics by name without "vllm:", and by the reason why a sequence ended."""
        values = {}
        for family in text_string_to_metric_families(self.ask("GET", "/metrics").text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    name = sample.labels.get("finished_reason", sample.name.removeprefix("vllm:"))
                    values[name] = sample.value
        return values

    def until_idle(self) -> dict[str, float]:
        """The metrics once nothing runs or waits and no block is owned."""
        until(lambda: not any(map(self.numbers().get, IDLE)))
        return self.numbers()


def until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds. Fails after HANG seconds."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {HANG:g} s"
        time.sleep(0.01)


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(prompt=prompt, **{**GREEDY, "max_tokens": TOKENS, **fields})


def first(*arguments: Any, **fields: Any) -> Any:
    """The first choice of a completion."""
    return complete(*arguments, **fields).choices[0]


def chat(client: openai.OpenAI, messages: Any = CHAT, **fields: Any) -> Any:
    options = {**GREEDY, "max_completion_tokens": TOKENS, **fields}
    return client.chat.completions.create(messages=messages, **options)


def counts(answer: Any) -> tuple[int, int, int]:
    """Tokens of prompts, of answers, and of both."""
    usage = answer.usage
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def events(text: str) -> list[Any]:
    """The data of a stream, to its end: [DONE] must be last."""
    *lines, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# ---- engines ------------------------------------------------------------------------------------


class Passes:
    """The passes of a runner from now on. Those with the numbers `failing`, from 1 on, raise
    `error`; behind a gate they wait until the test allows them."""

    def __init__(
        self, runner: Any, failing: Any = (), error: BaseException | None = None, gate: bool = False
    ) -> None:
        self.forward, self.failing, self.gate = runner.run, failing, gate
        self.error = error or RuntimeError("a planted fault")
        self.permits, self.count = threading.Semaphore(0), 0  # passes that have begun
        runner.run = self

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        assert not self.gate or self.permits.acquire(timeout=HANG), "the gate was never opened"
        if self.count in self.failing:
            raise self.error
        return self.forward(*arguments)

    def allow(self, passes: int = 10_000) -> None:
        self.permits.release(passes)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Tokens of the tiny model's vocabulary; none of them ends a text."""
    return [1 + (7 * seed + 13 * place) % 99 for place in range(length)]


def words(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def alone(model: Any, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The tokens of stage 01."""
    return Naive(model).generate([prompt], params)[0].token_ids


def ran(engine: Any) -> list[str]:
    """The ids of the requests of all passes, one after the other."""
    return [share.request_id for step in engine.steps for share in step.shares]


def is_empty(engine: Any) -> bool:
    scheduler = engine.scheduler
    return not (scheduler.running or scheduler.waiting or scheduler.pool.owned)


@asynccontextmanager
async def started(engine: Any, max_queue: int = 64) -> AsyncIterator[AsyncEngine]:
    """`engine` on its thread, which then ends. Unless it has died, nothing may be left in it. An
    error in a callback of the loop ends the test."""
    running, test = AsyncEngine(engine, max_queue), asyncio.current_task()
    errors: list[Any] = []

    def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context and test:
            errors.append(context["exception"])
            test.cancel()

    asyncio.get_running_loop().set_exception_handler(failed)
    running.start()
    try:
        async with asyncio.timeout(HANG):
            yield running
    finally:
        await running.stop()
        for error in errors:
            raise error
    assert is_empty(engine) or not running.alive


async def soon(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds, while the event loop goes on. Not for long: an emptied task
    makes many tests wait."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def submit(running: AsyncEngine, prompt: list[int], count: int) -> Ticket:
    return running.submit([prompt], [words(count)])[0][0]


async def said(running: AsyncEngine, ticket: Ticket) -> list[int]:
    """All tokens of a ticket, once it has ended. Raises the error that ended it."""
    await soon(lambda: ticket.ended)
    tokens, _ = running.read(ticket), running.read(ticket)
    return [token.id for token in tokens]


async def error_of(running: AsyncEngine, ticket: Ticket) -> str:
    """The failure that ended a ticket."""
    with pytest.raises((Broken, EngineDead)) as error:
        await said(running, ticket)
    return str(error.value)
