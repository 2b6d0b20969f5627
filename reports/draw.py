"""Writes all tables of the texts and draws all charts and pictures: `python -m reports.draw`.

No number is typed by hand. A benchmark turns its rows into tables, a chart and a headline; a table
stands between two markers on lines of their own:

    <!-- table: answers -->                     of the stage in whose folder the text is
    <!-- table: stage02_kv_cache.answers -->    of any stage, or of the staircase or the peers
    <!-- table: machine -->                     the machine, and what it gave beside all rows
    <!-- table: stages -->, <!-- table: beyond -->    the stages, each with its question and result
    <!-- /table -->

The texts show one machine, which reports/machines.json names; charts go to reports/charts/. What is
not measured yet stays as it is. `--check` writes nothing and names what is stale.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import matplotlib

from shared import charts, cli, kit, paths
from shared.kit import Results

from .figures import pictures

BEGIN, END = "<!-- table: ", "<!-- /table -->"
TABLE = re.compile(rf"^({BEGIN}([\w.]+) -->)\n((?:(?!<!-- /?table).*\n)*){END}$", re.M)
MARKER = re.compile(rf"^(?:{BEGIN}|{END}).*$", re.M)
QUESTION = re.compile(r'^QUESTION\b[^=]*= \(?\s*"(.+)"', re.M)
TEXTS = ("README.md", "reports/README.md", "stage[0-9][0-9]_*/RE*.md")
CORE = 7  # stages of the course; the others go beyond it


def modules() -> dict[str, ModuleType]:
    """What draws the results of a stage, by its name; the staircase and the peers likewise."""
    names = {name: f"{name}.benchmark" for name in paths.discover()}
    names |= {name: f"reports.{name}" for name in ("staircase", "peers")}
    return {name: importlib.import_module(module) for name, module in names.items()}


def drawn_with() -> dict[str, str]:
    """What the bytes of a chart depend on besides the data."""
    return {"matplotlib": matplotlib.__version__, "system": f"{sys.platform} {platform.machine()}"}


class Report:
    """Every file below `root` as it should be, by its path from there, and the problems found.

    notes: what stays as it was. default: the machine that the texts show; "": the one that
    reports/machines.json names.
    """

    def __init__(self, root: Path, default: str = "", check: bool = False) -> None:
        self.root, self.files = root, dict[Path, bytes]()
        self.problems, self.notes = list[str](), list[str]()
        file = root / "reports" / "machines.json"
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        self.default = default or known.get("default", "")
        drawers = known.get("charts", drawn_with()) if check else drawn_with()
        self.draws = drawers == drawn_with()
        settings = {"default": self.default, "charts": drawers}
        self.files[file.relative_to(root)] = (json.dumps(settings, indent=1) + "\n").encode()
        self.tables, self.headlines = dict[str, dict[str, str]](), dict[str, str]()
        for name, module in modules().items():
            path = root / "reports" / self.default / f"{name}.json"
            content = json.loads(path.read_bytes()) if path.exists() else {}
            if content.get("schema") != kit.SCHEMA:
                continue  # its tables stay as they are
            try:
                self._stage(name, module, Results(content))
            except (ArithmeticError, LookupError, ValueError) as error:
                self.notes.append(f"note: the rows of {name} do not make all of it ({error!r})")
        for name, draw in pictures().items() if self.draws else ():
            self.files[Path("reports/figures") / f"{name}.svg"] = charts.render(draw())
        for pattern in TEXTS:
            for path in sorted(root.glob(pattern)):
                self._text(path)

    def _stage(self, name: str, module: ModuleType, results: Results) -> None:
        """A stage's tables, its headline and its chart. Refused rows may be too few for them."""
        drawn = {key: kit.table(lines) for key, lines in module.tables(results).items()}
        if hasattr(module, "headline"):
            self.headlines[name] = next(module.headline(results), kit.UNMEASURED)
        self.tables[name] = drawn | {"machine": kit.machine(results)}
        if hasattr(module, "chart") and self.draws:
            picture = Path("reports/charts") / f"{name}.svg"
            self.files[picture] = charts.render(module.chart(results))

    def _text(self, path: Path) -> None:
        """Fill in the tables of one text, and name markers that lead nowhere."""
        name, text = path.relative_to(self.root).as_posix(), (_read(path) or b"").decode()
        for marker in MARKER.findall(TABLE.sub("", text)):
            self.problems.append(f"problem: '{marker}' in {name} is not one of a pair of markers")

        def fill(match: re.Match[str]) -> str:
            begin, table, kept = match.groups()
            stage, _, short = table.rpartition(".")
            drawn = self.tables.get(stage or path.parent.name, {})
            if short in ("stages", "beyond"):
                drawn = {short: kit.table(self._stages(short == "beyond"))}
            elif drawn and short not in drawn:
                self.problems.append(f"problem: there is no table '{table}', as {name} wants")
            content = drawn.get(short, kept.strip() or kit.UNMEASURED)
            return f"{begin}\n\n{content}\n\n{END}"

        self.files[path.relative_to(self.root)] = TABLE.sub(fill, text).encode()

    def _stages(self, beyond: bool) -> Iterator[dict[str, str]]:
        """What each stage's __init__.py says, and its headline."""
        for name in paths.discover(self.root)[CORE if beyond else 0 : None if beyond else CORE]:
            text = (self.root / name / "__init__.py").read_text(encoding="utf-8")
            question = QUESTION.search(text)
            yield {
                "stage": f"[{name}]({name}/)",
                "question": question[1] if question else "",
                "one number": self.headlines.get(name, kit.UNMEASURED),
            }


def _read(path: Path) -> bytes | None:  # git may have changed line ends
    return path.read_bytes().replace(b"\r\n", b"\n") if path.is_file() else None


def report(root: Path, default: str = "", check: bool = False) -> int:
    """Check or update the reports below `root` and print what was found. Returns the exit
    status."""
    result = Report(root, default, check)
    stale = [path for path, wanted in result.files.items() if _read(root / path) != wanted]
    for path in stale:
        if not check:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(result.files[path])
        print(f"{'stale' if check else 'written'}: {path.as_posix()}")
    for line in result.notes + result.problems:
        print(line)
    if not stale and not result.problems:
        print(f"All {len(result.files)} files of the reports match the results.")
    return 1 if result.problems or (check and stale) else 0


def main(argv: list[str] | None = None) -> int:
    about = "Writes every table and draws every chart from the results in reports/."
    parser = cli.Parser("reports.draw", about, "  python -m reports.draw    after a benchmark")
    stale = "write nothing, name what is stale, and end with status 1 if anything is"
    parser.add_argument("--check", action="store_true", help=stale)
    parser.add_argument("--default", default="", help="the machine that the texts show from now on")
    options = parser.parse_args(argv)
    return report(paths.ROOT, options.default, options.check)


if __name__ == "__main__":
    cli.run(main)
