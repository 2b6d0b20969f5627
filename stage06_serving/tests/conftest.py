"""Real server processes, reached over real sockets: what all tests of this stage start from."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from shared.config import Config
from shared.course.testing import FIELDS, make_folder, random_checkpoint
from shared.server import OwnServer, own_server, python
from stage06_serving.settings import PREFIX

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
    """`with serve(*arguments, env=..., module=...) as running`: a server for as long as the block lasts."""
    return serving


@pytest.fixture(scope="session")
def house() -> Iterator[House]:
    """house(*arguments, env=...): a server that shares its process with others and lasts as long as they: quick to start. For
    tests that neither stop it nor look at the process. It can be made to fail: see faulty_server.py."""
    with python(["-m", "stage06_serving.tests.house"], environment()) as process:

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
