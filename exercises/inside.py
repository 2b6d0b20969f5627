"""Run tests in a tree and write a JSON line for each: what `check` and `grade` start there.

    python exercises/inside.py '{"tests": ["stage02_kv_cache"], "seed": 7}'

The lines go to standard output, and what the tests print goes to standard error. It loads no
module of the project before pytest does, and no plugin that the project does not name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

MOST = 300  # characters of a reason
# In place of the project's own options, which name plugins. What a student prints is shown.
OPTIONS = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminal", "--capture=no"]
ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()


def difference(value: Any, expected: Any, atol: float = 0.0, rtol: float = 0.0) -> str:
    """The first difference: "row 1, column 1 is 6, not 0"; "" if there is none."""
    place, why = _first(value, expected, atol, rtol)
    if why and len(place) in (1, 2) and all(isinstance(part, int) for part in place):
        names = ("item",) if len(place) == 1 else ("row", "column")
        return ", ".join(f"{n} {i}" for n, i in zip(names, place, strict=True)) + f" {why}"
    text = "".join(f".{part}" if isinstance(part, str) else f"[{part}]" for part in place)
    return why and f"{text.lstrip('.') or 'it'} {why}"


def _first(value: Any, expected: Any, atol: float, rtol: float) -> tuple[tuple[object, ...], str]:
    """Where two values first differ, and how; how is "" if they do not."""
    if hasattr(value, "tolist") and hasattr(expected, "tolist"):
        for name in ("shape", "dtype"):
            if (left := getattr(value, name)) != (right := getattr(expected, name)):
                shown = (tuple(left), tuple(right)) if name == "shape" else (left, right)
                return (), f"has the {name} {shown[0]}, not {shown[1]}"
        value, expected = value.tolist(), expected.tolist()
    if dataclasses.is_dataclass(value) and type(value) is type(expected):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
        value, expected = ({n: getattr(x, n) for n in names} for x in (value, expected))
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(value, Mapping) and isinstance(expected, Mapping):
        keys = dict.fromkeys([*expected, *value])
        pairs = [(key, value.get(key, ABSENT), expected.get(key, ABSENT)) for key in keys]
    elif all(isinstance(x, Sequence) and not isinstance(x, str | bytes) for x in (value, expected)):
        both = enumerate(zip_longest(value, expected, fillvalue=ABSENT))
        pairs = [(index, left, right) for index, (left, right) in both]
    elif isinstance(value, float) and isinstance(expected, float):
        if abs(value - expected) > atol + rtol * abs(expected) or value != value:
            return (), f"is {value:.6g}, not {expected:.6g}"
    elif value != expected:
        return (), f"is {repr(value)[:80]}, not {repr(expected)[:80]}"
    for key, left, right in pairs:
        place, why = _first(left, right, atol, rtol)
        if why:
            return (key, *place), why
    return (), ""


class Reporter:
    """The plugin that writes a line for each test: its id, its outcome, and why it failed.

    first: tests to run before all others. last: the test that runs last.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        seed: int = 0,
        first: Sequence[str] = (),
        last: str = "",
    ) -> None:
        self.write, self.seed, self.first, self.last = write, seed, first, last
        self.difference = ""  # that of the last comparison

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("filterwarnings", "ignore:.*deterministic implementation")
        if self.seed and "hypothesis" in sys.modules:  # examples of its own
            from hypothesis import core, settings

            settings.register_profile("drawn", settings(), derandomize=False, database=None)
            settings.load_profile("drawn")
            core.global_force_seed = self.seed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def place(item: pytest.Item) -> tuple[bool, bool]:
            return item.nodeid == self.last, item.nodeid.partition("[")[0] not in self.first

        items.sort(key=place)
        if torch := sys.modules.get("torch"):
            for name in ("equal", "allclose"):
                setattr(torch, name, self._remembering(getattr(torch, name)))

    def _remembering(self, compare: Callable[..., bool]) -> Callable[..., bool]:
        default = {"equal": (0.0, 0.0)}.get(compare.__name__, (1e-8, 1e-5))

        def remember(value: Any, expected: Any, **options: Any) -> bool:
            result = compare(value, expected, **options)
            if not result:
                atol, rtol = options.get("atol", default[0]), options.get("rtol", default[1])
                self.difference = difference(value, expected, atol, rtol)
            return result

        return remember

    def pytest_runtest_setup(self) -> None:
        self.difference = ""
        random.seed(self.seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(self.seed)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        if op == "==":
            self.difference = difference(left, right)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[assignment]
        if report.outcome != "passed" or report.when == "call":
            why = "" if call.excinfo is None else self._why(call.excinfo)[:MOST]
            outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            self.write({"id": item.nodeid, "outcome": outcome, "why": why})
        return report  # type: ignore[return-value]

    def _why(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
        error, text = excinfo.value, str(excinfo.value).partition("\n")[0]
        if isinstance(error, AssertionError):
            compared = any(sign in str(error) for sign in ("==", "equal", "allclose"))
            return (compared and self.difference) or text or "an assertion failed"
        here = [
            entry
            for entry in excinfo.traceback
            if Path(entry.path).is_relative_to(Path.cwd()) and "/tests/" not in str(entry.path)
        ]
        line = f" ({Path(here[-1].path).name}, line {here[-1].lineno + 1})" if here else ""
        return f"{type(error).__name__}: {text}{line}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            why = lines[-1][1:].strip() if lines else "its tests cannot be collected"
            self.write({"id": report.nodeid, "outcome": "failed", "why": why[:MOST]})


def run(
    tests: Sequence[str],
    write: Callable[[dict[str, Any]], None],
    options: Sequence[str] = ("-m", "not slow and not gpu"),
    **reported: Any,
) -> None:
    """Run tests of the tree in the working directory, and write pytest's exit status as the last
    line. options: of pytest. reported: for Reporter."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    status = pytest.main([*OPTIONS, *options, *tests], plugins=[Reporter(write, **reported)])
    write({"status": int(status)})


def main() -> None:
    job = json.loads(sys.argv[1])
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if memory := job.pop("memory", 0):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**29, 2**29))
    if cache := job.pop("cache", ""):  # compiled kernels of the reference
        shutil.copytree(cache, os.environ["XDG_CACHE_HOME"], dirs_exist_ok=True)
    sys.path[0] = os.getcwd()
    with results:
        run(job.pop("tests"), lambda line: print(json.dumps(line), file=results, flush=True), **job)


if __name__ == "__main__":
    main()
