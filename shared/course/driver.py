"""The inside of grading: `python -m shared.course.driver` runs a driver in a contained process.

A stage's `drivers.py` has for each of its tasks a function of a `random.Random` that makes calls on
the task's functions, and returns what came of them as plain data: numbers, texts, lists, tensors.
It runs once with the submission and once with the reference, each in its own process, and judge.py
compares the two, outside. So nothing in this process is trusted, and nothing in it knows a result.
A driver returns what it was given, never whether that is right.

TWINS, by task and file, are functions elsewhere that compute what the task's do, and that its
driver does not need: they are empty beside a submission.

Dictionaries with the key "call" say which call their other entries belong to: failures show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ..checkpoint import PRESETS, Checkpoint, Config, random_tensors
from ..errors import UserError

if TYPE_CHECKING:
    from stage01_forward.model import GPT2

Driver = Callable[[random.Random], object]
Entry = dict[str, object]  # what a driver returns of one call
T = TypeVar("T")
PROCESSES, FILES = 64, 128  # of each: as sockets they hold 2 GB that no process is seen to have
_lines: Any = None  # where results go; None outside of grading


def plain(value: Any) -> Any:
    """`value` as JSON has it: tensors and arrays with dtype and shape, bytes as hexadecimal digits,
    errors by their kind."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        wide = value.detach().cpu()
        wide = wide.double() if wide.is_floating_point() else wide
        return _array(kind, wide.shape, wide.flatten().tolist())
    if isinstance(value, np.ndarray):
        return _array(str(value.dtype), value.shape, value.flatten().tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, BaseException):
        return {"error": type(value).__name__}
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, range | slice | torch.dtype):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=str)
    if value is None or isinstance(value, bool | int | str):
        return value
    return [plain(inner) for inner in value]


def _array(kind: str, shape: Sequence[int], values: list[Any]) -> dict[str, Any]:
    return {"dtype": kind, "shape": list(shape), "values": [plain(value) for value in values]}


def outcome(call: Callable[..., T], *arguments: object) -> T | Exception:
    """What a call returns, or the kind of the error that it raises. An error that no caller may
    expect, such as TypeError, ends the driver: it is a mistake in the submission."""
    try:
        return call(*arguments)
    except (UserError, ValueError, RuntimeError, LookupError) as error:
        if isinstance(error, NotImplementedError):
            raise
        return error


def now(text: str) -> None:
    """Name the call that comes next: if the process dies in it, the judge says in which."""
    if _lines is not None:
        _lines.write(json.dumps({"now": text}) + "\n")
        _lines.flush()


def random_checkpoint(config: Config, seed: int = 0, spread: float = 4.0) -> Checkpoint:
    """Seeded random weights, `spread` times as wide as a fresh GPT-2's, with nonzero biases.

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


def tiny(draw: random.Random) -> GPT2:
    """A small model in float64 with weights of this draw."""
    from . import stages

    checkpoint = random_checkpoint(PRESETS["tiny"], draw.randrange(2**20), spread=16.0)
    model: GPT2 = stages.load_model(checkpoint, dtype=torch.float64)
    return model


def tensors(draw: random.Random, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal random numbers of this draw."""
    generator = torch.Generator().manual_seed(draw.randrange(2**40))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def arrays(draw: random.Random, *shape: int, kind: str = "float64") -> np.ndarray:
    """The same as a NumPy array."""
    return tensors(draw, *shape).numpy().astype(kind)


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while all tasks wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def at_once(timeout: float | None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        selector.select = at_once

    def time(self) -> float:
        return self.now


def main() -> None:
    """The contained process: its job on standard input, a line of JSON for each seed on standard
    output, and all that is printed on standard error."""
    global _lines
    _lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    now("")  # contained, and ready for the job
    line = sys.stdin.readline()
    if not line:  # the judge has ended
        return
    job = json.loads(line)
    _limit(job["seconds"], job["disk"])
    torch.set_num_threads(1)
    for line in results(job):
        _lines.write(line + "\n")
        _lines.flush()
    os._exit(0)  # without waiting for threads and exit handlers


def results(job: Mapping[str, Any]) -> Any:
    try:
        lay_over(job)
        if "measure" in job:
            yield json.dumps({"data": measured(job)}, allow_nan=False)
            return
        module = importlib.import_module(f"{job['stage']}.drivers")
        drivers: list[Driver] = [module.DRIVERS[number] for number in job["tasks"]]
    except BaseException as error:
        yield json.dumps({"raised": described(error)})
        return
    for drive, seed in itertools.product(drivers, job["seeds"]):
        torch.manual_seed(seed)
        random.seed(seed)
        now("")  # no call of it yet
        try:
            data = {"data": plain(drive(random.Random(seed)))}
        except BaseException as error:
            data = {"raised": described(error)}
        yield json.dumps(data, allow_nan=False)


def measured(job: Mapping[str, Any]) -> dict[str, Any]:
    """For the capstone: a stage's run of the staircase's workload."""
    staircase = importlib.import_module("reports.staircase")
    return asdict(staircase.work(job["measure"], job["plan"], job["threads"]))


def lay_over(job: Mapping[str, Any]) -> None:
    """Put the submission's files, if there are any, over their stages. alone: with the reference's
    functions for all other tasks."""
    from . import mine

    only = frozenset(job["tasks"]) if job["alone"] else None
    for folder in sorted(Path("mine").glob("stage*")):
        mine.overlay(folder.name, folder.resolve(), only=only)
        sys.path.append(str(folder / "variant"))


def described(error: BaseException) -> str:
    """An error in one line, with the last line of the submission that it passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/mine/" in f"/{f.filename}"]
    text = f"{type(error).__name__}: {error}".partition("\n")[0][:500]
    if not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _limit(seconds: float, disk: int) -> None:
    """Limits of processor time, of processes, of open files and of a file's size, for this process
    and those that it starts."""
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        most = int(2 * seconds) + 10
        for limit, value in (
            (resource.RLIMIT_CPU, most),
            (resource.RLIMIT_NPROC, PROCESSES),
            (resource.RLIMIT_NOFILE, FILES),
            (resource.RLIMIT_FSIZE, disk * 2**20),
            (resource.RLIMIT_CORE, 0),
        ):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    # In the module that drivers import: this one has another `_lines`, and `now` would write none.
    importlib.import_module("shared.course.driver").main()
