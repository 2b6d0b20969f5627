"""The pytest plugin of the project: shared models, and the number of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")  # of trio alone, which takes as long to import
from hypothesis import HealthCheck, Phase, settings
from safetensors.torch import save_file

from .. import paths
from ..checkpoint import PRESETS, Checkpoint, Config, random_tensors
from ..parity import random_prompt
from ..tokenizer import byte_alphabet
from . import stages
from .driver import random_checkpoint as random_checkpoint

# jsonschema does without it; it would be imported by every process, and takes seconds.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# Shapes to compare with `transformers`: heads, depths, odd vocabularies and contexts, GPT-2 124M.
SHAPES = {  # tokens, positions, width, layers, heads
    "one head, one layer": Config(61, 32, 16, 1, 1, name="one"),
    "odd sizes": Config(101, 77, 36, 3, 4, name="odd"),
    "deep and narrow": Config(257, 128, 40, 8, 5, name="deep"),
    "wide": Config(999, 100, 256, 2, 8, name="wide"),
    "124M": PRESETS["gpt2"],
}

# The config.json of `make_folder`.
FIELDS: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 48, "n_embd": 16}
FIELDS |= {"n_layer": 2, "n_head": 2, "eos_token_id": 256}


SERVERS = "stage06_serving/tests/"
LONGEST = (  # the longest first
    *(SERVERS, "shared/course/tests/test_museum.py", "stage12_distributed/tests/test_router.py"),
    *("shared/course/tests/test_exercise.py", "stage07_loadtest/tests/test_main.py"),
    *("stage12_distributed/tests/test_ranks.py", "stage07_loadtest/tests/test_ruler.py"),
    *("shared/course/tests/test_lessons.py", "reports/tests/test_peers.py"),
    "stage12_distributed/tests/test_simulator.py",
)

# Examples may be slow because of other work on the machine. They are the same in each run:
# `--hypothesis-profile default` draws others. "any": any example that fails will do, not the
# smallest one, which takes long to find.
SLOW = [HealthCheck.too_slow]
settings.register_profile(
    "staircase", deadline=None, derandomize=True, database=None, suppress_health_check=SLOW
)
phases = (Phase.explicit, Phase.generate)
settings.register_profile("any", settings.get_profile("staircase"), phases=phases)
settings.load_profile("staircase")


def wide_norm(self: Any, x: Any) -> Any:
    """For RMSNorm.forward: the norm without its float32 island, which an engine in another language
    cannot copy to the last bit. Stage 08's own tests compare it with transformers."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
    return self.weight * x * scale


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The number of extra processes: two for the default run of everything, none for a part of it.

    Each process imports PyTorch, which takes longer than the tests of one stage; and -m slow, -m
    micro and --mine need the machine, or the process, for themselves. Two, not one a core: the
    tests' own servers and browsers need cores too. With three on two cores the run takes a fifth
    less, and now and then a test that waits for a server waits too long.
    """
    chosen = config.option
    marks_of_own = chosen.markexpr not in config.getini("addopts")
    part = chosen.file_or_dir or chosen.keyword or chosen.mine or marks_of_own
    return 0 if part or (os.cpu_count() or 1) < 2 else 2


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process takes whole files; those of stage 06 count as one, so that its servers start
    only once."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SERVERS if nodeid.startswith(SERVERS) else super()._split_scope(nodeid)

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes, what takes longest comes first, so that it is not left at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.nodeid.startswith(name) for name in LONGEST])


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # One of two processes: with all cores each, their threads would wait for each other.
        threads = max(1, (os.cpu_count() or 1) // 3)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the programs that tests start
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the other tests keep it busy


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.getoption("markexpr")
    return f"chosen: -m '{chosen}' (to run the rest, give another -m: slow, gpu, weights)"


def make_folder(folder: Path, vocabulary: int = 257) -> Path:
    """A complete checkpoint folder whose tokens are the bytes and <|endoftext|>."""
    folder.mkdir()
    save_file(random_tensors(Config.from_dict(FIELDS)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FIELDS), encoding="utf-8")
    tokens = byte_alphabet() | {f"<{i}>": i for i in range(256, vocabulary - 1)}
    tokens["<|endoftext|>"] = vocabulary - 1
    (folder / "vocab.json").write_text(json.dumps(tokens), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return folder


def python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python words` in the project's folder, without input, and capture both outputs. options:
    for `subprocess.run`."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "input": ""}
    settings = {"cwd": paths.ROOT, "encoding": "utf-8", "timeout": 600, **pipes, **options}
    return subprocess.run([sys.executable, *map(str, words)], **settings)


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    """A model small enough for hundreds of prompts: 3 layers, 2 heads, 64 positions, 101 tokens."""
    return random_checkpoint(PRESETS["tiny"], spread=16.0)  # 4 gives the same token all the time


@pytest.fixture(scope="session")
def tiny_model(tiny: Checkpoint) -> Any:
    """`tiny` in float64, where all stages must agree to the last token."""
    return stages.load_model(tiny, dtype=torch.float64)


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
