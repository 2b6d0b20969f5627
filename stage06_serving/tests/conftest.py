"""Real server processes, reached over real sockets, for all tests of this stage."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from shared.config import Config
from shared.course.testing import FIELDS, make_folder, random_checkpoint
from shared.server import OwnServer, own_server, python
from stage05_paged.blocks import BlockPool
from stage05_paged.make import make as make_paged
from stage06_serving.engines import Paged
from stage06_serving.settings import PREFIX
from stage06_serving.tests.crowd import HANG, post
from stage06_serving.tests.faulty_server import MODULE, VARIABLE, Fault
from stage06_serving.tests.tools import Failing, Gate, alone, words

ALWAYS = ("--sanitize", "--linear", "plain")
FEW_BLOCKS = ("--kv-memory", "8MiB")  # the sanitizer checks all blocks after every step
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

Serve = Callable[..., AbstractContextManager["Running"]]
House = Callable[..., "Running"]


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


def read_metrics(url: str) -> dict[str, float]:
    """The server's metrics by name and labels, without the label of the model."""
    text = httpx2.get(f"{url}/metrics", trust_env=False, timeout=60, verify=False).text
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f'{name}="{value}"' for name, value in sample.labels.items()]
            kept = ",".join(label for label in labels if not label.startswith("model_name="))
            values[sample.name + (f"{{{kept}}}" if kept else "")] = sample.value
    return values


def until_idle(url: str, timeout: float = 60) -> dict[str, float]:
    """The server's metrics once nothing runs or waits and no block is owned. Fails after `timeout`
    seconds."""
    deadline = time.monotonic() + timeout
    while any((values := read_metrics(url))[name] for name in IDLE):
        busy = {name: values[name] for name in IDLE}
        assert time.monotonic() < deadline, f"not idle after {timeout:g} s: {busy}"
        time.sleep(0.02)
    return values


@pytest.fixture(scope="session")
def serve() -> Serve:
    """`with serve(*arguments, env=..., module=...) as running`: a server while the block lasts."""
    return serving


@pytest.fixture(scope="session")
def house() -> Iterator[House]:
    """house(*arguments, env=...): a server in a process that it shares with others, quick to start.

    For tests that neither stop it nor look at its process. It can fail: see faulty_server.py.
    """
    with python(["-m", MODULE, "many"], environment()) as process:

        def start(*arguments: str, env: Mapping[str, str] | None = None) -> Running:
            running = Running(**{**vars(process), "begins": process.log.stat().st_size})
            line = json.dumps([["--port", "0", *ALWAYS, *arguments], dict(env or {})])
            assert running.process.stdin is not None
            running.process.stdin.write(line.encode() + b"\n")
            running.process.stdin.flush()
            running.wait()
            return running

        yield start


@pytest.fixture(scope="session")
def locked(tiny_folder: Path) -> Iterator[Running]:
    """A server with three keys, and without a chat template."""
    key = {f"{PREFIX}API_KEY": "first-key, second-key, zweiter-schlüssel"}
    options = ("--kv-memory", "64KiB", "--chat-template", "none")
    with serving("--model", str(tiny_folder), *options, env=key) as running:
        yield running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """One server on the embedded model for all tests; none may break or stop it."""
    with serving(*FEW_BLOCKS) as running:
        yield running
        log = running.stderr()
        assert running.process.poll() is None and "Traceback" not in log, log


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The official client of `server`, without retries."""
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def metrics():
    """metrics(url): the server's metrics."""
    return read_metrics


@pytest.fixture(scope="session")
def wait_idle():
    """wait_idle(url, timeout=60): the server's metrics once it is idle."""
    return until_idle


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder for quick servers: 2 layers, 256 positions, bytes for tokens.

    256 is end-of-text, and the ids up to 299 have no token. Most random answers are not UTF-8.
    """
    folder = make_folder(tmp_path_factory.mktemp("serving") / "tiny")
    fields = FIELDS | {"n_positions": 256}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    tensors = random_checkpoint(Config.from_dict(fields), spread=16.0).tensors
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def engine(tiny_model):
    """make(**options): an engine that checks its memory after every step."""

    def make(blocks=80, **options):
        options = {"max_sequences": 8, **options}
        return Paged(make_paged(tiny_model, pool=BlockPool(blocks, 4), sanitize=True, **options))

    return make


@pytest.fixture
def gated(engine):
    """make(**options): an engine, and the gate before its passes."""

    def make(**options):
        made = engine(**options)
        gate = made.engine.runner.run = Gate(made.engine.runner.run)
        return made, gate

    return make


@pytest.fixture
def failing(engine):
    """make(which, error=None, **options): an engine whose passes with these numbers fail."""

    def make(which, error=None, **options):
        made = engine(**options)
        made.engine.runner.run = Failing(made.engine.runner.run, which, error)
        return made

    return make


@pytest.fixture
def expected(tiny_model):
    """expected(prompt, count): the tokens of stage 01."""
    return lambda prompt, count: alone(tiny_model, prompt, words(count))


# ---- servers with planted faults ----------------------------------------------------------------


@pytest.fixture(scope="module")
def faults():
    """All that a module has planted."""
    return []


@pytest.fixture(autouse=True)
def mended(faults):
    yield
    for fault in faults:
        fault.mend()


@pytest.fixture(scope="module")
def new_fault(tmp_path_factory, faults):
    """new_fault(): a fault, and the variable by which a server finds it."""

    def new():
        faults.append(Fault(tmp_path_factory.mktemp("faults") / "fault"))
        return faults[-1], {VARIABLE: str(faults[-1].file)}

    return new


@pytest.fixture(scope="module")
def lodge(house, tiny_folder, new_fault):
    """lodge(options): a server that shares its process, and its fault. It must not be stopped."""

    def lodge(options):
        fault, env = new_fault()
        return house("--model", str(tiny_folder), *options.split(), env=env), fault

    return lodge


@pytest.fixture
def start(serve, tiny_folder, new_fault):
    """start(options): the same in a process of its own, which ends with the test."""
    with ExitStack() as stack:

        def start(options):
            fault, env = new_fault()
            arguments = ("--model", str(tiny_folder), *options.split())
            return stack.enter_context(serve(*arguments, env=env, module=MODULE)), fault

        yield start


@pytest.fixture(scope="module")
def few(lodge):
    """Two run and three wait."""
    return lodge("--max-sequences 2 --max-queue 3")


@pytest.fixture(scope="module")
def many(lodge):
    """Room for a crowd."""
    return lodge("--max-sequences 24 --max-queue 300 --kv-memory 1MiB")


@pytest.fixture(scope="module")
def hasty(lodge):
    """A request has one second."""
    return lodge("--request-timeout 1 --max-sequences 4")


@pytest.fixture(scope="module")
def http():
    limits = httpx2.Limits(max_connections=None)
    with httpx2.Client(trust_env=False, timeout=HANG, limits=limits) as client:
        yield client


@pytest.fixture
def at_once(http):
    """at_once(running, body): the future of an answer."""
    with ThreadPoolExecutor(64) as pool:
        yield lambda running, body: pool.submit(post, http, running, body)
