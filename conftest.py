"""What all tests share: two models, and how many processes run them. Helpers of tests that are no
fixtures: shared/testing.py."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from shared import cli, models
from shared.checkpoint import PRESETS, Checkpoint, Config
from shared.parity import random_prompt
from shared.testing import random_checkpoint

# Examples may be slow because of other work on the machine. They are the same in each run;
# `--hypothesis-profile default` draws others. "any": any example that fails will do, not the
# smallest one, which takes long to find.
SLOW = [HealthCheck.too_slow]
settings.register_profile(
    "staircase", deadline=None, derandomize=True, database=None, suppress_health_check=SLOW
)
phases = (Phase.explicit, Phase.generate)
settings.register_profile("any", settings.get_profile("staircase"), phases=phases)
settings.load_profile("staircase")


@pytest.hookimpl(optionalhook=True)  # `python -m exercises` runs tests without xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the run of everything; none for a part of it, which takes less time than a
    process that imports PyTorch."""
    part = config.option.file_or_dir or config.option.keyword
    return 0 if part or (os.cpu_count() or 1) < 2 else 2


def pytest_configure(config: pytest.Config) -> None:
    for name in [name for name in os.environ if name.startswith("STAIRCASE_")]:
        del os.environ[name]  # the user's own options of the server
    if hasattr(config, "workerinput"):  # one of two processes, which share the cores
        threads = max(1, (os.cpu_count() or 1) // 2)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the programs that tests start
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine: it has an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def limited() -> None:
        async with asyncio.timeout(120):
            await test(**arguments)

    asyncio.run(limited())
    return True


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    """A model small enough for hundreds of prompts: 3 layers, 2 heads, 64 positions, 101 tokens."""
    return random_checkpoint(PRESETS["tiny"], spread=16.0)  # 4 gives the same token all the time


@pytest.fixture(scope="session")
def tiny_model(tiny: Checkpoint) -> Any:
    """`tiny` in float64, where all stages must agree to the last token."""
    return models.load_model(tiny, dtype=torch.float64)


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[list[int]]]:
    """prompts(config, count, longest): seeded random prompts of 1 to `longest` tokens."""

    def make(config: Config, count: int, longest: int) -> list[list[int]]:
        return [random_prompt(1 + i * 7 % longest, config, i) for i in range(count)]

    return make


@pytest.fixture
def interruptible() -> Iterator[None]:
    """For tests that send SIGINT to their own processes: a background job, and so its children,
    would ignore it."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """run(main, *arguments) -> (exit status, standard output, standard error) of a program."""

    def call(main: Any, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            cli.run(main, list(arguments))
        captured = capsys.readouterr()
        assert isinstance(exit.value.code, int) and "Traceback" not in captured.err
        return exit.value.code, captured.out, captured.err

    return call
