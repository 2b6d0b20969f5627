"""Servers, most in threads of this process and one in its own, for all tests of this stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import save_file

from shared.config import Config
from shared.testing import FIELDS, make_folder, random_checkpoint
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make as make_paged

from .tools import HANG, House, Passes, started

FEW_BLOCKS = ("--kv-memory", "8MiB")  # the sanitizer checks all blocks after every step
KEYS = "first-key, second-key, zweiter-schlüssel"


@pytest.fixture(scope="session")
def house() -> Iterator[Callable[..., House]]:
    """house(*arguments): a server of its own."""
    houses: list[House] = []

    def start(*arguments: str) -> House:
        houses.append(House(*arguments))
        return houses[-1]

    yield start
    for each in houses:
        each.stop()


@pytest.fixture(scope="session")
def server(house: Callable[..., House]) -> House:
    """One server on the embedded model for all tests; none may break or stop it."""
    return house(*FEW_BLOCKS)


@pytest.fixture(scope="session")
def locked(house: Callable[..., House], tiny_folder: Path) -> House:
    """A server with keys and more names."""
    options = ["--api-key", KEYS, "--allowed-host", "inner.example, other"]
    return house("--model", str(tiny_folder), *options, "--kv-memory", "64KiB")


@pytest.fixture(scope="session")
def client(server: House) -> Iterator[openai.OpenAI]:
    """The official client of `server`, without retries."""
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=HANG) as client:
        yield client


def checkpoint(folder: Path, **fields: Any) -> Path:
    """A checkpoint folder with bytes for tokens, these fields, and random weights."""
    make_folder(folder)
    fields = {**FIELDS, **fields}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    tensors = random_checkpoint(Config.from_dict(fields), spread=16.0).tensors
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder for quick servers: 2 layers, 256 positions, bytes for tokens.

    256 is end-of-text, and the ids up to 299 have no token. Most random answers are not UTF-8.
    """
    return checkpoint(tmp_path_factory.mktemp("serving") / "tiny", n_positions=256)


@pytest.fixture(scope="session")
def bytes_server(house: Callable[..., House], tiny_folder: Path) -> House:
    """A server whose tokens are bytes, in float64, without the sanitizer."""
    options = ("--dtype", "float64", "--kv-memory", "1MiB", "--no-sanitize")
    return house("--model", str(tiny_folder), *options)


@pytest.fixture
def engine(tiny_model):
    """make(**options): an engine that checks its memory after every step."""

    def make(blocks=80, **options):
        options = {"max_sequences": 8, **options}
        return make_paged(tiny_model, pool=BlockPool(blocks, 4), sanitize=True, **options)

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
