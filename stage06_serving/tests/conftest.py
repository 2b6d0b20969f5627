"""Real server processes, reached over real sockets: what all tests of this stage start from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from shared.checkpoint import Config
from shared.stages import ROOT
from shared.testing import random_checkpoint
from shared.tests.test_cli import FIELDS, make_folder
from stage06_serving.settings import PREFIX

ALWAYS = ("--port", "0", "--sanitize", "--linear", "plain")
PROGRAM = ("-m", "stage06_serving")
HOUSE = ("-m", "stage06_serving.tests.house")
FEW_BLOCKS = (
    "--kv-memory",
    "8MiB",
)  # of the embedded model: after every step the sanitizer looks at all of them
STARTING = 180.0  # seconds: the machine may have other work
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

Serve = Callable[..., AbstractContextManager["Running"]]
House = Callable[..., "Running"]


@dataclass
class Running:
    """A server process that answers at `url`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path  # its standard error, and
    begins: int = 0  # the byte at which its own words begin

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def stderr(self) -> str:
        """What it has written to standard error so far."""
        return self.log.read_bytes()[self.begins :].decode()

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
    *arguments: str, env: Mapping[str, str] | None = None, program: Sequence[str] = PROGRAM
) -> Iterator[Running]:
    """A server with these arguments and variables, from its first answer to /health on; it is stopped in any case.

    program: what Python shall run, for a server with a planted fault. Raises RuntimeError with its words if it does not start.
    """
    with _process([*program, *ALWAYS, *arguments], environment(env)) as running:
        running.url = _address(running)
        yield running


@contextmanager
def _process(arguments: Sequence[str], variables: Mapping[str, str]) -> Iterator[Running]:
    """Python with these arguments, for as long as the block lasts; it has no address yet."""
    with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    try:
        yield Running(process, "", Path(log.name))
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
        Path(log.name).unlink()


def _address(running: Running) -> str:
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline:
        said = running.stderr()
        if running.process.poll() is not None or said.startswith("error: "):
            raise RuntimeError(f"The server ended with {running.process.returncode}: {said}")
        lines = [
            line
            for line in said.splitlines(keepends=True)
            if line.startswith("Staircase serves ") and line.endswith("\n")
        ]
        if lines:
            url = lines[0].split()[-1]
            try:
                if (
                    httpx2.get(
                        f"{url}/health", trust_env=False, timeout=60, verify=False
                    ).status_code
                    == 200
                ):
                    return url
            except httpx2.TransportError:
                pass
        time.sleep(0.05)
    raise RuntimeError(f"The server did not start within {STARTING:g} s: {running.stderr()}")


def read_metrics(url: str) -> dict[str, float]:
    """The server's numbers, by name and labels as Prometheus writes them; the label of the model is left out."""
    found = {}
    for family in text_string_to_metric_families(
        httpx2.get(f"{url}/metrics", trust_env=False, timeout=60, verify=False).text
    ):
        for sample in family.samples:
            labels = ",".join(
                f'{name}="{value}"' for name, value in sample.labels.items() if name != "model_name"
            )
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def until_idle(url: str, timeout: float = 60) -> dict[str, float]:
    """Wait until nothing runs or waits and no block is owned; the server's numbers then. Fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        found = read_metrics(url)
        if not any(found[name] for name in IDLE):
            return found
        busy = {name: found[name] for name in IDLE}
        assert time.monotonic() < deadline, f"not idle after {timeout:g} s: {busy}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def serve() -> Serve:
    """`with serve(*arguments, env=..., program=...) as running`: a server for as long as the block lasts."""
    return serving


@pytest.fixture(scope="session")
def house() -> Iterator[House]:
    """house(*arguments, env=...): a server that shares its process with others and lasts as long as they: quick to start. For
    tests that neither stop it nor look at the process. It can be made to fail: see faulty_server.py."""
    with ExitStack() as stack:
        begun: list[Running] = []

        def start(*arguments: str, env: Mapping[str, str] | None = None) -> Running:
            if not begun:  # when the first one is asked for
                begun.append(stack.enter_context(_process(HOUSE, environment())))
            process, log = begun[0].process, begun[0].log
            running = Running(process, "", log, log.stat().st_size)
            assert process.stdin is not None
            process.stdin.write(
                json.dumps([[*ALWAYS, *arguments], dict(env or {})]).encode() + b"\n"
            )
            process.stdin.flush()
            running.url = _address(running)
            return running

        yield start


@pytest.fixture(scope="session")
def locked(tiny_folder: Path) -> Iterator[Running]:
    """A server with three keys, and without a chat template."""
    key = {f"{PREFIX}API_KEY": "first-key, second-key, zweiter-schlüssel"}
    with serving(
        "--model", str(tiny_folder), "--kv-memory", "64KiB", "--chat-template", "none", env=key
    ) as running:
        yield running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """One server for all tests, on the embedded model and with the usual settings. Nobody may break or stop it."""
    with serving(*FEW_BLOCKS) as running:
        yield running
        assert running.process.poll() is None and "Traceback" not in running.stderr(), (
            running.stderr()
        )


@pytest.fixture
def start_server() -> Iterator[Callable[..., Running]]:
    """start_server(*arguments, env=..., program=...): another server, which ends with the test."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(serving(*arguments, **options))


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The official client of `server`, without retries."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="session")
def metrics() -> Callable[[str], dict[str, float]]:
    """metrics(url): the server's numbers."""
    return read_metrics


@pytest.fixture(scope="session")
def wait_idle() -> Callable[..., dict[str, float]]:
    """wait_idle(url, timeout=60): until /metrics says 0 running, 0 waiting and 0 cache usage; the numbers then."""
    return until_idle


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder for servers that must be quick: 2 layers, 256 positions, bytes for tokens (256 is end-of-text, and the
    ids up to 299 have no token). Its random answers are mostly no UTF-8."""
    folder = make_folder(tmp_path_factory.mktemp("serving") / "tiny")
    fields = FIELDS | {"n_positions": 256}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    save_file(
        random_checkpoint(Config.from_dict(fields), spread=16.0).tensors,
        folder / "model.safetensors",
    )
    return folder
