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
from pathlib import Path
from typing import Any

import pytest

MOST = 300  # characters of a reason
# In place of the project's own options, which name plugins.
OPTIONS = ("-o", "addopts=", "-m", "not slow and not gpu", "-p", "no:cacheprovider")
OPTIONS += ("-p", "no:terminal", "--capture=no")  # what a student prints is shown


def difference(value: Any, expected: Any, atol: float = 0.0, rtol: float = 0.0) -> str:
    """The first difference: "row 1, column 1 is 6, not 0"; "" if there is none."""
    place, why = _first(value, expected, atol, rtol) or ((), "")
    if not why:
        return ""
    if place and all(isinstance(part, int) for part in place):
        names = {1: ("item",), 2: ("row", "column")}.get(len(place))
        if names:
            return ", ".join(f"{n} {i}" for n, i in zip(names, place, strict=True)) + f" {why}"
    text = "".join(f".{part}" if isinstance(part, str) else f"[{part}]" for part in place)
    return f"{text.lstrip('.') or 'it'} {why}"


def _first(
    value: Any, expected: Any, atol: float, rtol: float
) -> tuple[tuple[object, ...], str] | None:
    """Where two values first differ, and how; None if they do not."""
    if hasattr(value, "tolist") and hasattr(expected, "tolist"):
        for name in ("shape", "dtype"):
            sides = getattr(value, name, None), getattr(expected, name, None)
            if sides[0] != sides[1]:
                sides = tuple(tuple(s) if name == "shape" else s for s in sides)  # type: ignore
                return (), f"has the {name} {sides[0]}, not {sides[1]}"
        value, expected = value.tolist(), expected.tolist()
    if dataclasses.is_dataclass(value) and type(value) is type(expected):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
        value, expected = ({n: getattr(x, n) for n in names} for x in (value, expected))
    if isinstance(value, Mapping) and isinstance(expected, Mapping):
        for key in [*expected, *(key for key in value if key not in expected)]:
            if key not in value or key not in expected:
                return (), f"{'lacks' if key in expected else 'has also'} {_short(key)}"
            if inner := _first(value[key], expected[key], atol, rtol):
                return (key if isinstance(key, str | int) else str(key), *inner[0]), inner[1]
        return None
    pair = value, expected
    if all(isinstance(x, Sequence) and not isinstance(x, str | bytes) for x in pair):
        for index, (left, right) in enumerate(zip(value, expected, strict=False)):
            if inner := _first(left, right, atol, rtol):
                return (index, *inner[0]), inner[1]
        if len(value) != len(expected):
            return (), f"has {len(value)} items, not {len(expected)}"
        return None
    if isinstance(value, float) and isinstance(expected, float):
        near = abs(value - expected) <= atol + rtol * abs(expected) or value == expected
    else:
        near = type(value) in (type(expected), bool, int, float) and value == expected
    return None if near else ((), f"is {_short(value)}, not {_short(expected)}")


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _names(test: str) -> Iterator[str]:
    """What a test may be called: its id, that without parameters, its class, its file."""
    yield test
    name = test.partition("[")[0]
    while name:
        yield name
        name = name.rpartition("::")[0]


class Reporter:
    """The plugin that writes a line for each test: its id, its outcome, and why it failed."""

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        seed: int | None = None,
        only: Sequence[str] = (),
        last: str = "",
    ) -> None:
        self.write, self.seed, self.only, self.last_test = write, seed, {*only, last}, last
        self.last = ""  # the first difference of the last comparison that failed

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("filterwarnings", "ignore:.*deterministic implementation")
        if self.seed is not None and "hypothesis" in sys.modules:  # examples of its own
            from hypothesis import core, settings

            settings.register_profile("drawn", settings(), derandomize=False, database=None)
            settings.load_profile("drawn")
            core.global_force_seed = self.seed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if len(self.only) > 1:
            items[:] = [item for item in items if self.only & {*_names(item.nodeid)}]
        items.sort(key=lambda item: item.nodeid == self.last_test)

    def pytest_collection_finish(self) -> None:
        if torch := sys.modules.get("torch"):
            for name in ("equal", "allclose"):
                setattr(torch, name, self._remembering(getattr(torch, name)))

    def _remembering(self, compare: Callable[..., bool]) -> Callable[..., bool]:
        def remember(value: Any, expected: Any, **options: Any) -> bool:
            result = compare(value, expected, **options)
            if not result:
                default = {"equal": (0.0, 0.0)}.get(compare.__name__, (1e-8, 1e-5))
                atol, rtol = options.get("atol", default[0]), options.get("rtol", default[1])
                self.last = difference(value, expected, atol, rtol)
            return result

        return remember

    def pytest_runtest_setup(self) -> None:
        self.last = ""
        seed = 0 if self.seed is None else self.seed
        random.seed(seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(seed)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        if op == "==":
            self.last = difference(left, right)
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[assignment]
        if report.outcome != "passed" or report.when == "call":
            why = "" if call.excinfo is None else self._why(call.excinfo)
            outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            self.write({"id": item.nodeid, "outcome": outcome, "why": why})
        return report  # type: ignore[return-value]

    def _why(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
        error, text = excinfo.value, str(excinfo.value)
        if isinstance(error, AssertionError):
            if self.last and any(sign in text for sign in ("==", "equal", "allclose")):
                return self.last
            return text.partition("\n")[0] or "an assertion failed"
        if type(error).__module__ == "_pytest.outcomes":
            return text
        places = [e for e in excinfo.traceback if "/tests/" not in str(e.path)]
        here = [e for e in places if Path(e.path).is_relative_to(Path.cwd())]
        line = f" ({Path(here[-1].path).name}, line {here[-1].lineno + 1})" if here else ""
        return f"{type(error).__name__}: {text.partition(chr(10))[0]}{line}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            why = lines[-1][1:].strip() if lines else "its tests cannot be collected"
            self.write({"id": report.nodeid, "outcome": "failed", "why": why})


def run(
    tests: Sequence[str],
    write: Callable[[dict[str, Any]], None],
    stop: bool = False,
    **reported: Any,
) -> int:
    """Run tests of the tree in the working directory; pytest's exit status. stop: at the first that
    fails. reported: for Reporter."""

    def shortened(line: dict[str, Any]) -> None:
        write({**line, "why": line["why"][:MOST]})

    words = [*OPTIONS, *(["-x"] if stop else []), *tests]
    return int(pytest.main(words, plugins=[Reporter(shortened, **reported)]))


def main() -> None:
    job = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)
        if cache := job.pop("cache", ""):  # compiled kernels of the reference: a scratch copy
            shutil.copytree(cache, os.environ["XDG_CACHE_HOME"], dirs_exist_ok=True)

        def write(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=results, flush=True)

        sys.path[0] = os.getcwd()
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        write({"status": run(job.pop("tests"), write, **job)})


if __name__ == "__main__":
    main()
