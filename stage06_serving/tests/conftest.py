"""Real server processes, reached over real sockets, for all tests of this stage."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import save_file

from shared.config import Config
from shared.paths import ROOT
from shared.server import OwnServer, own_server, stop
from shared.testing import FIELDS, make_folder, random_checkpoint
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make as make_paged
from stage06_serving.settings import PREFIX

from .faulty_server import MODULE, VARIABLE, Fault
from .tools import Passes, Plans, started

ALWAYS = ("--sanitize", "--linear", "plain", "--engine", "paged")
FILE_KEY = "a key from a file"
FEW_BLOCKS = ("--kv-memory", "8MiB")  # the sanitizer checks all blocks after every step

House = Callable[..., "Running"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine: it has an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    names = inspect.signature(test).parameters
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class Running(OwnServer):
    """A server process that answers at `url`."""

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20) -> int:
        """Send a signal and wait for the end; the exit code. Raises subprocess.TimeoutExpired."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables without those of the server, and with `extra` ones."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return own | {"OMP_NUM_THREADS": "1"} | dict(extra or {})


@contextmanager
def serving(
    *arguments: str, env: Mapping[str, str] | None = None, module: str | None = None
) -> Iterator[Running]:
    """A server with these arguments and variables; it is killed at the end of the block.

    module: what Python runs instead, for a server with a planted fault.
    """
    with own_server([*ALWAYS, *arguments], True, environment(env), module) as server:
        try:
            yield Running(**vars(server))
        finally:
            server.process.kill()


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """house(*arguments, env=...): a server in a process shared with others, so quick to start.

    For tests that neither stop it nor look at its process. faulty_server.py makes it fail.
    """
    log = tmp_path_factory.mktemp("house") / "stderr"
    command, variables = [sys.executable, "-m", MODULE, "many"], environment()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=file, stderr=file
        )

    def start(*arguments: str, env: Mapping[str, str] | None = None) -> Running:
        running = Running(process, log, begins=log.stat().st_size)
        line = json.dumps([["--port", "0", *ALWAYS, *arguments], dict(env or {})])
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        running.wait()
        return running

    try:
        yield start
    finally:
        stop(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def locked(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server in a process of its own, with keys in its variables and in a file, other names, and
    requests in its log; without a chat template."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"another\n{FILE_KEY}\n", encoding="utf-8")
    options = ["--api-key-file", str(file), "--allowed-host", "inner.example, other"]
    options += ["--log-requests", "--kv-memory", "64KiB", "--chat-template", "none"]
    env = {f"{PREFIX}API_KEY": "first-key, second-key, zweiter-schlüssel"}
    with serving("--model", str(tiny_folder), *options, env=env, module=MODULE) as running:
        yield running


@pytest.fixture(scope="session")
def server(house: House) -> Iterator[Running]:
    """One server on the embedded model for all tests; none may break or stop it."""
    running = house(*FEW_BLOCKS)
    yield running
    log = running.stderr()  # the others in its process only have planted faults
    assert running.process.poll() is None, log
    assert log.count("Traceback") == log.count("RuntimeError: a planted fault"), log


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The official client of `server`, without retries."""
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def slowly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variable that makes each pass of a server take 10 ms longer."""
    fault = Fault(tmp_path_factory.mktemp("pace") / "fault")
    fault.plant("0.01")
    return {VARIABLE: str(fault.file)}


def checkpoint(folder: Path, tensors: dict[str, Any] | None = None, **fields: Any) -> Path:
    """A checkpoint folder with bytes for tokens, these fields, and random weights by default."""
    make_folder(folder)
    fields = {**FIELDS, **fields}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    tensors = tensors or random_checkpoint(Config.from_dict(fields), spread=16.0).tensors
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder for quick servers: 2 layers, 256 positions, bytes for tokens.

    256 is end-of-text, and the ids up to 299 have no token. Most random answers are not UTF-8.
    """
    return checkpoint(tmp_path_factory.mktemp("serving") / "tiny", n_positions=256)


@pytest.fixture(scope="session")
def bytes_server(house: House, tiny_folder: Path) -> Running:
    """A server whose tokens are bytes, in float64, without the sanitizer."""
    options = ("--dtype", "float64", "--kv-memory", "1MiB", "--no-sanitize")
    return house("--model", str(tiny_folder), *options)


@pytest.fixture
def engine(tiny_model):
    """make(**options): an engine that checks its memory after every step."""

    def make(blocks=80, **options):
        options = {"max_sequences": 8, **options}
        made = make_paged(tiny_model, pool=BlockPool(blocks, 4), sanitize=True, **options)
        Plans(made)
        return made

    return make


@pytest.fixture
def gated(engine):
    """gated(max_queue, **options): an engine on its thread, as AsyncEngine and as itself, and the
    gate before its passes."""

    @asynccontextmanager
    async def make(max_queue=64, **options):
        made = engine(**options)
        gate = Passes(made.runner, gate=True)
        async with started(made, max_queue) as running:
            yield running, made, gate

    return make
