"""Run tests in a tree and write a JSON line for each: what `check`, `grade` and `prove` start.

    python exercises/inside.py '{"tests": ["stage02_kv_cache"], "seed": 7}'

The lines go to standard output, and what the tests print goes to standard error. It loads no
module of the project before pytest does, and no plugin that the project does not name.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

MOST = 300  # characters of a reason
# In place of the project's own options, which name plugins. What a student prints is shown.
OPTIONS = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminal", "--capture=no"]
OPTIONS += ["-m", "not slow and not gpu"]
ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()


def difference(value: Any, expected: Any, near: Sequence[float] = (0, 0), at: str = "") -> str:
    """Where two values first differ: "[1][1] is 6, not 0"; "" if they do not.

    near: an absolute and a relative tolerance. at: the path to the values.
    """
    for name in ("shape", "dtype") if hasattr(value, "tolist") else ():
        left, right = getattr(value, name), getattr(expected, name, ABSENT)
        if left != right:
            return f"{at or 'it'} has the {name} {left}, not {right}"
    value, expected = (x.tolist() if hasattr(x, "tolist") else x for x in (value, expected))
    if type(value) is type(expected) and hasattr(value, "__dataclass_fields__"):
        value, expected = vars(value), vars(expected)
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(value, dict) and isinstance(expected, dict):
        keys = dict.fromkeys([*expected, *value])
        pairs = [(key, value.get(key, ABSENT), expected.get(key, ABSENT)) for key in keys]
    elif isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        both = enumerate(zip_longest(value, expected, fillvalue=ABSENT))
        pairs = [(index, left, right) for index, (left, right) in both]
    elif isinstance(value, float) and isinstance(expected, float):
        if not abs(value - expected) <= near[0] + near[1] * abs(expected):
            return f"{at or 'it'} is {value:.6g}, not {expected:.6g}"
    elif value != expected:
        return f"{at or 'it'} is {repr(value)[:80]}, not {repr(expected)[:80]}"
    texts = (difference(left, right, near, f"{at}[{key!r}]") for key, left, right in pairs)
    return next(filter(None, texts), "")


class Reporter:
    """The plugin that writes a line for each test: its id, its outcome, and why it failed.

    seed: of random inputs. first: tests to run before all others. last: the test that runs last.
    fill: memory that is not initialized is full of NaN.
    """

    def __init__(
        self,
        write: Callable[..., None],
        seed: int = 0,
        first: Sequence[str] = (),
        last: str = "",
        fill: bool = False,
    ) -> None:
        self.write, self.seed, self.first, self.last, self.fill = write, seed, first, last, fill
        self.difference = ""  # that of the last comparison

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("filterwarnings", "ignore:.*deterministic implementation")
        if self.seed and (hypothesis := sys.modules.get("hypothesis")):  # examples of its own
            hypothesis.settings.register_profile("drawn", derandomize=False, database=None)
            hypothesis.settings.load_profile("drawn")
            hypothesis.core.global_force_seed = self.seed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda i: (i.nodeid == self.last, i.nodeid.split("[")[0] not in self.first))
        if torch := sys.modules.get("torch"):
            if self.fill:
                torch.use_deterministic_algorithms(True, warn_only=True)
            torch.equal = self._remembering(torch.equal, 0.0, 0.0)
            torch.allclose = self._remembering(torch.allclose, 1e-8, 1e-5)

    def _remembering(self, compare: Any, atol: float, rtol: float) -> Callable[..., bool]:
        def remember(value: Any, expected: Any, **options: Any) -> bool:
            if not (same := compare(value, expected, **options)):
                near = options.get("atol", atol), options.get("rtol", rtol)
                self.difference = difference(value, expected, near)
            return same

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
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report: Any = yield
        if report.outcome != "passed" or report.when == "call":
            why = self._why(call.excinfo)[:MOST] if call.excinfo else ""
            self.write({"id": item.nodeid, "outcome": report.outcome, "why": why})
        return report

    def _why(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
        error, text = excinfo.value, str(excinfo.value).partition("\n")[0]
        if isinstance(error, AssertionError):
            compared = any(sign in str(error) for sign in ("==", "equal", "allclose"))
            return (compared and self.difference) or text or "an assertion failed"
        entries = [(Path(entry.path), entry.lineno + 1) for entry in excinfo.traceback]
        ours = [
            e for e in entries if e[0].is_relative_to(Path.cwd()) and e[0].parent.name != "tests"
        ]
        line = f" ({ours[-1][0].name}, line {ours[-1][1]})" if ours else ""
        return f"{type(error).__name__}: {text}{line}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.write({"id": report.nodeid, "outcome": "failed", "why": lines[-1][1:].strip()})


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
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

    def write(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=results, flush=True)

    words = [*OPTIONS, *job.pop("options", []), *job.pop("tests")]
    write({"status": int(pytest.main(words, plugins=[Reporter(write, **job)]))})


if __name__ == "__main__":
    main()
