"""The pytest plugin of the project: shared models, the number of processes, and --mine.

`pytest stage04_continuous --mine` runs the tests against the student's copy of that stage: see
mine.py. `-k task2` chooses the tests of task 2, with --mine or without.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import save_file

from .. import paths
from ..checkpoint import PRESETS, Checkpoint, Config, random_tensors
from ..parity import random_prompt
from ..task import Task
from ..tokenizer import byte_alphabet
from . import mine, stages

# Shapes to compare with `transformers`: heads, depths, odd vocabularies and contexts, GPT-2 124M.
SHAPES = {
    "one head, one layer": Config(
        vocab_size=61, n_positions=32, n_embd=16, n_layer=1, n_head=1, name="one"
    ),
    "odd sizes": Config(vocab_size=101, n_positions=77, n_embd=36, n_layer=3, n_head=4, name="odd"),
    "deep and narrow": Config(
        vocab_size=257, n_positions=128, n_embd=40, n_layer=8, n_head=5, name="deep"
    ),
    "wide": Config(vocab_size=999, n_positions=100, n_embd=256, n_layer=2, n_head=8, name="wide"),
    "124M": PRESETS["gpt2"],
}

FIELDS = {  # the config.json of `make_folder`
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_positions": 48,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "eos_token_id": 256,
}


# Examples may be slow because of other work on the machine.
settings.register_profile("staircase", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("staircase")


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The number of extra processes: two for the default run of everything, none for a part of it.

    Each process imports PyTorch, which takes longer than the tests of one stage; and -m slow, -m
    micro and --mine need the machine, or the process, for themselves. Two, not one a core: the
    tests' own servers need cores too.
    """
    chosen = config.option
    marks_of_own = chosen.markexpr not in config.getini("addopts")
    part = chosen.file_or_dir or chosen.keyword or chosen.mine or marks_of_own
    return 0 if part or (os.cpu_count() or 1) < 2 else 2


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.getoption("markexpr")
    return f"chosen: -m '{chosen}' (to run the rest, give another -m: slow, gpu, weights)"


def random_checkpoint(config: Config, seed: int = 0, spread: float = 4.0) -> Checkpoint:
    """Seeded random weights, `spread` times as wide as a fresh GPT-2's, with biases unlike zero.

    With fresh weights a layer hardly changes its input, and a mistake in it would not show.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = random_tensors(config, seed)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
        elif not name.startswith("w"):
            tensor *= spread
    return Checkpoint(config, tensors)


def make_folder(folder: Path, vocabulary: int = 257) -> Path:
    """A complete checkpoint folder whose tokens are the bytes and <|endoftext|>."""
    folder.mkdir()
    save_file(random_tensors(Config.from_dict(FIELDS)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FIELDS), encoding="utf-8")
    tokens = byte_alphabet() | {f"<{i}>": i for i in range(256, vocabulary - 1)}
    (folder / "vocab.json").write_text(
        json.dumps(tokens | {"<|endoftext|>": vocabulary - 1}), encoding="utf-8"
    )
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return folder


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


# ---- --mine: the tests of a stage against the student's copy of it ----


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mine",
        action="store_true",
        help="test your own copy of a stage, made by `python -m shared.course.exercise start`",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Lay the copies over their stages before the stages are imported."""
    given = early_config.known_args_namespace
    if not given.mine:
        return
    wanted = _stages_of(given.file_or_dir or ["."], early_config.invocation_params.dir)
    copies = [stage for stage in wanted if mine.folder(stage).is_dir()]
    if not copies:
        name = wanted[0] if len(wanted) == 1 else "stage01_forward"
        whose = name if len(wanted) == 1 else "a stage"
        advice = f"make one with `{mine.command('start', name)}`"
        raise pytest.UsageError(f"--mine: there is no copy of {whose} in {mine.HOME}: {advice}.")
    for stage in copies:
        mine.overlay(stage)


def _stages_of(arguments: Sequence[str], directory: Path) -> list[str]:
    """The stages named by the arguments of pytest."""
    known, found = paths.discover(), []
    for argument in arguments:
        path = (directory / argument.split("::")[0]).resolve()
        if path == paths.ROOT:
            return known
        if path.is_relative_to(paths.ROOT):
            found.append(path.relative_to(paths.ROOT).parts[0])
    return [stage for stage in known if stage in found]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # One of two processes: with all cores each, their threads would wait for each other.
        threads = max(1, (os.cpu_count() or 1) // 2)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the programs that tests start
    if config.getoption("mine"):
        config.pluginmanager.register(_Mine())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let -k choose tests by task."""
    for item in items:
        item.extra_keyword_matches.update(f"task{task.number}" for task in _tasks_of(item.nodeid))


def _tasks_of(nodeid: str) -> list[Task]:
    """The tasks that a test judges."""
    stage, _, test = nodeid.partition("/")
    return [task for task in mine.tasks(stage) if task.judged_by(test)]


class _Mine:
    """The plugin that --mine adds, once the copies are laid over their stages."""

    def __init__(self) -> None:
        self.collected: list[str] = []  # ids of the tests of the copies, chosen or not
        self.passed: dict[str, bool] = {}  # by id, of the tests that ran
        self._patch = pytest.MonkeyPatch()

    def pytest_sessionstart(self) -> None:
        """Skip tests that start Python: the new process would run the reference, not the copy."""
        start = subprocess.Popen.__init__

        def begin(popen: Any, args: Any, *rest: Any, **options: Any) -> None:
            if not isinstance(args, (str, bytes)) and str(next(iter(args), "")) == sys.executable:
                pytest.skip("it starts a process, and that would run the reference")
            start(popen, args, *rest, **options)

        self._patch.setattr(subprocess.Popen, "__init__", begin)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out the tests of other stages."""
        others = [item for item in items if item.nodeid.partition("/")[0] not in mine.ACTIVE]
        if others:
            config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.nodeid.partition("/")[0] in mine.ACTIVE]
        self.collected = [item.nodeid for item in items]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """An open task raises its error in the tests that judge it, but in no fixture: other tests
        may share those."""
        judged = mine.ACTIVE[item.nodeid.partition("/")[0]].judged
        judged.update(task.number for task in _tasks_of(item.nodeid))
        try:
            return (yield)
        finally:
            judged.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and not report.failed

    def pytest_sessionfinish(self) -> None:
        """Keep the results of tasks whose tests all ran, for `python -m shared.course.exercise
        status`."""
        self._patch.undo()
        for stage in mine.ACTIVE:
            results = {}
            for task in mine.tasks(stage):
                ids = [
                    test
                    for test in self.collected
                    if test.startswith(f"{stage}/") and task in _tasks_of(test)
                ]
                known = {test.partition("/")[2].partition("[")[0] for test in ids}
                whole = all(
                    test in known or any(name.startswith(f"{test}::") for name in known)
                    for test in task.tests
                )
                if any(not self.passed.get(test, True) for test in ids):
                    results[task.number] = False
                elif whole and all(test in self.passed for test in ids):
                    results[task.number] = True
            mine.record(stage, results)
