"""Run tests in a tree and write a JSON line for each: what `check`, `grade` and `prove` start.

    python -c "$(cat exercises/inside.py)" '{"seed": 7}' stage02_kv_cache

The text is the program, so that a container needs no other file than the tree. The lines go to
standard output, and what the tests print goes to standard error. It loads no module of the project
before pytest does, and no plugin that the project does not name.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest

MOST = 300  # characters of a reason
# In place of the project's own options, which name plugins. What a student prints is shown.
OPTIONS = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminal", "--capture=no"]
OPTIONS += ["-m", "not slow and not gpu"]


class Shown(str):
    """A text that is false and has no quotes in pytest's message."""

    __repr__ = str.__str__

    def __bool__(self) -> bool:
        return False


ABSENT = Shown("nothing")


def difference(value: Any, expected: Any, near: Sequence[float] = (0, 0), at: str = "") -> str:
    """Where two values first differ: "[1][1] is 6, not 0"; "" if they do not.

    near: an absolute and a relative tolerance. at: the path to the values.
    """
    for name in ("shape", "dtype") if hasattr(value, "tolist") else ():
        left, right = getattr(value, name), getattr(expected, name, ABSENT)
        if left != right:
            return f"{at or 'it'} has the {name} {left}, not {right}"
    value, expected = (x.tolist() if hasattr(x, "tolist") else x for x in (value, expected))
    left, right = _parts(value), _parts(expected)
    if left is not None and right is not None:
        pairs = ((key, left.get(key, ABSENT), right.get(key, ABSENT)) for key in right | left)
        texts = (difference(x, y, near, f"{at}[{key!r}]") for key, x, y in pairs)
        return next(filter(None, texts), "")
    if isinstance(value, float) and isinstance(expected, float):
        if not abs(value - expected) <= near[0] + near[1] * abs(expected):
            return f"{at or 'it'} is {value:.6g}, not {expected:.6g}"
    elif value != expected:
        return f"{at or 'it'} is {repr(value)[:80]}, not {repr(expected)[:80]}"
    return ""


def _parts(value: Any) -> dict[Any, Any] | None:
    """What a sequence, a dictionary or a dataclass holds, by index or name."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    value = vars(value) if hasattr(value, "__dataclass_fields__") else value
    return value if isinstance(value, dict) else None


def compared(compare: Any, near: Sequence[float], x: Any, y: Any, /, **options: Any) -> Any:
    """As torch.equal or torch.allclose, but a false result shows as the first difference."""
    near = options.get("atol", near[0]), options.get("rtol", near[1])
    return compare(x, y, **options) or Shown(difference(x, y, near))


@dataclass(eq=False)
class Reporter:
    """The plugin that writes a line for each test: its id, and how it ended.

    seed: of random inputs. first: tests to run before all others. fill: memory that is not
    initialized is full of NaN.
    """

    results: TextIO
    seed: int = 0
    first: Sequence[str] = ()
    fill: bool = False

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("filterwarnings", "ignore:.*deterministic implementation")
        if self.seed and (hypothesis := sys.modules.get("hypothesis")):  # examples of its own
            hypothesis.settings.register_profile("drawn", derandomize=False, database=None)
            hypothesis.settings.load_profile("drawn")
            hypothesis.core.global_force_seed = self.seed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.nodeid.split("[")[0] not in self.first)
        if torch := sys.modules.get("torch"):
            if self.fill:
                torch.use_deterministic_algorithms(True, warn_only=True)
            torch.equal = partial(compared, torch.equal, (0.0, 0.0))
            torch.allclose = partial(compared, torch.allclose, (1e-8, 1e-5))

    def pytest_runtest_setup(self) -> None:
        random.seed(self.seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(self.seed)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str]:
        why = difference(left, right) if op == "==" else ""
        return [why] if why else []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report: Any = yield
        if report.outcome != "passed" or report.when == "call":
            why = _why(call.excinfo) if call.excinfo else ""
            self._write(item.nodeid, report.outcome, why)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            why = str(report.longrepr).rpartition("\nE ")[2].partition("\n")[0]
            self._write(report.nodeid, "failed", why.strip())

    def _write(self, *line: str) -> None:
        print(json.dumps(line), file=self.results, flush=True)


def _why(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    """The text of a failure in a line: of an assertion without " + where", of an error with its
    place."""
    lines = str(excinfo.value).splitlines() or [""]
    if isinstance(excinfo.value, AssertionError):
        told = (line.removeprefix("assert ") for line in lines if not line.startswith(" +"))
        return " ".join(" ".join(told).split())[:MOST]
    places = [(Path(entry.path), entry.lineno + 1) for entry in excinfo.traceback]
    ours = [at for at in places if Path.cwd() in at[0].parents and at[0].parent.name != "tests"]
    line = f" ({ours[-1][0].name}, line {ours[-1][1]})" if ours else ""
    return f"{type(excinfo.value).__name__}: {lines[0][:MOST]}{line}"


def main() -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)
        reporter = Reporter(results, **json.loads(sys.argv[1]))
        status = pytest.main([*OPTIONS, *sys.argv[2:]], plugins=[reporter])
    sys.exit(status)


if __name__ == "__main__":
    main()
