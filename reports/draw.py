"""Draws all charts and writes all tables of the reports from the results in reports/:
`python -m reports.draw`.

No number is typed by hand. A benchmark turns its results into tables (markdown), charts (figures)
and a headline. Tables go between markers on lines of their own, in README.md, reports/README.md,
and a stage's README.md and REPORT.md:

    <!-- table: speed -->                       the stage's own table, in its folder
    <!-- table: stage02_kv_cache.speed -->      a stage's table, in any text
    <!-- table: intel-xeon-8cpu/speed -->       a table of another machine than the texts' own
    <!-- table: stages -->                      all stages: question, result, file to open first
    <!-- table: references -->                  other projects' claims, from reports/references.json
    <!-- /table -->

Charts go to reports/<machine>/<stage>_<name>.svg. `--check` writes nothing and names what a run
without it would change.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from shared import charts, cli, measure, paths
from shared.bench import rows
from shared.errors import UserError

from . import staircase
from .peers import compare, quantized, shapes

BEGIN, END = "<!-- table: ", "<!-- /table -->"  # on lines of their own
TABLE = re.compile(
    rf"^(?P<begin>{BEGIN}(?P<name>[\w./-]+) -->)\n(?:(?!<!-- /?table).*\n)*{END}$", re.MULTILINE
)
MARKER = re.compile(rf"^(?:{BEGIN}|{END}).*$", re.MULTILINE)
ABOUT = re.compile(r'^(QUESTION|FIRST_FILE)\b[^=]*= \(?\s*"(.+)"', re.MULTILINE)
FIGURES = "figures"  # in reports/: pictures of mechanisms, drawn by `reports.figures`
UPDATE = "run python -m reports.draw"
UNMEASURED = "not measured yet"


def benchmarks() -> dict[str, Any]:
    """Every stage's benchmark in reading order, the staircase, which compares them, other engines
    beside them, the cross-check of the load test, and what rounded weights lose."""
    names = [name for name in paths.discover() if (paths.ROOT / name / "benchmark.py").exists()]
    modules = {name: importlib.import_module(f"{name}.benchmark").BENCHMARK for name in names}
    modules |= {module.KIND: module.BENCHMARK for module in (staircase, compare, shapes, quantized)}
    for stem in ("crosscheck", "losses"):
        for path in sorted(paths.ROOT.glob(f"stage*/{stem}.py")):
            module = importlib.import_module(f"{path.parent.name}.{stem}")
            modules[module.KIND] = module.BENCHMARK
    return modules


def drawn_with() -> dict[str, str]:
    """What the bytes of a chart depend on besides the data."""
    return {"matplotlib": matplotlib.__version__, "system": f"{sys.platform} {platform.machine()}"}


class Report:
    """Every file below `root` as it should be, by its path from there, and the problems found.

    With `check`, charts drawn by another version or system need only exist, since their bytes would
    differ. The texts show the numbers of the default machine, which reports/machines.json keeps;
    initially it is the first in the alphabet. A stage that has not run there shows another
    machine's.
    """

    def __init__(self, root: Path, modules: Mapping[str, Any], check: bool = False) -> None:
        self.root, self.modules = root, modules
        self.files: dict[Path, bytes] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.tables: dict[str, dict[str, str]] = {}  # stage or machine/stage -> name -> markdown
        self.headlines: dict[str, str] = {}
        self._results(check)
        overviews = {"stages": self._stages_table(), "references": self._references_table()}
        self.tables[""] = overviews  # of all stages
        for pattern in ("README.md", "reports/README.md", "stage[0-9][0-9]_*/RE*.md"):
            for path in sorted(root.glob(pattern)):  # the texts that may hold tables
                self._text(path)

    @property
    def stale(self) -> list[Path]:
        """The files that are absent or differ, apart from line ends, which git may have changed."""
        return [path for path, wanted in self.files.items() if _read(self.root / path) != wanted]

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _results(self, check: bool) -> None:
        """Tables, charts and headlines."""
        every = sorted(self.root.glob("reports/*/*.json"))
        known = [path for path in every if path.stem in self.modules]
        for path in set(every) - set(known):
            unknown = f"{self._name(path)} belongs to no stage with a benchmark: delete it"
            self.problems.append(unknown)
        if not known:
            self.notes.append("there are no results in reports/ yet")
            return
        file = self.root / "reports" / "machines.json"
        settings = json.loads(file.read_text()) if file.exists() else {}
        default = settings.get("default", known[0].parent.name)
        drawers = settings.get("charts", drawn_with()) if check else drawn_with()
        if drawers != drawn_with():
            theirs, ours = (" on ".join(drawn.values()) for drawn in (drawers, drawn_with()))
            self.notes.append(f"charts were not compared: drawn by matplotlib {theirs}, not {ours}")
        pictures: set[Path] = set()
        shown = {path.stem: path for path in reversed(known)}  # in the texts
        shown |= {path.stem: path for path in known if path.parent.name == default}
        for path in known:
            stage, module = path.stem, self.modules[path.stem]
            try:
                results = measure.load(path)
            except UserError as error:
                self.problems.append(str(error))
                continue
            tables = self.tables[f"{path.parent.name}/{stage}"] = module.tables(results)
            if path == shown[stage]:
                self.tables[stage], self.headlines[stage] = tables, module.headline(results)
            for name, draw in module.charts(results).items():
                picture = path.with_name(f"{stage}_{name}.svg")
                pictures.add(picture)
                if drawers == drawn_with():
                    self.files[picture.relative_to(self.root)] = charts.render(draw())
                elif not picture.exists():
                    self.problems.append(f"{self._name(picture)} does not exist: {UPDATE}")
        self.problems += [
            f"{self._name(path)} is drawn by no benchmark: delete it"
            for path in sorted(self.root.glob("reports/*/*.svg"))
            if path not in pictures and path.parent.name != FIGURES
        ]
        content = json.dumps({"default": default, "charts": drawers}, indent=1) + "\n"
        self.files[file.relative_to(self.root)] = content.encode()

    def _stages_table(self) -> str:
        """The table of the top README: what each stage's __init__.py says, and its headline."""
        lines = []
        for name in paths.discover(self.root):
            text = (self.root / name / "__init__.py").read_text(encoding="utf-8")
            about = dict(ABOUT.findall(text))
            first = about.get("FIRST_FILE", "")
            if not first or not (self.root / name / first).exists():
                self.problems.append(f"{name}/__init__.py has no FIRST_FILE that exists")
            cells = {"stage": f"[{name}]({name}/)", "question": about.get("QUESTION", "")}
            cells["result"] = self.headlines.get(name, UNMEASURED)
            lines.append(cells | {"open first": f"[`{first}`]({name}/{first})"})
        return rows.table(lines)

    def _references_table(self) -> str:
        """What other projects claim, what to know about it, and this project's counterpart."""
        columns: dict[str, rows.Column] = {
            "what to know": "caveat",
            "our counterpart": lambda claim: (
                f"[{claim['stage']}](../{claim['stage']}/REPORT.md): "
                f"{self.headlines.get(claim['stage'], UNMEASURED)}"
            ),
        }
        claims = json.loads(_read(self.root / "reports" / "references.json") or b"[]")
        return rows.table(claims, "project | says | on | what to know | our counterpart", columns)

    def _text(self, path: Path) -> None:
        """Fill in the tables of one text, and name markers that lead nowhere."""
        name, text = self._name(path), (_read(path) or b"").decode("utf-8")
        alone = MARKER.findall(TABLE.sub("", text))
        self.problems += [
            f"{name}: '{marker}' is not part of a pair: a table stands between '{BEGIN}NAME -->' "
            f"and '{END}'"
            for marker in alone
        ]

        def fill(marker: re.Match[str]) -> str:
            table = self._find(marker["name"], path.parent.name)
            if table is None:
                self.problems.append(
                    f"{name}: there is no table '{marker['name']}': run the benchmark, or correct "
                    "the name"
                )
                return marker[0]
            return f"{marker['begin']}\n\n{table.strip()}\n\n{END}"

        if not alone:
            self.files[path.relative_to(self.root)] = TABLE.sub(fill, text).encode()

    def _find(self, name: str, here: str) -> str | None:
        """The table of this name, for a text in the folder `here`, or a note that it was not
        measured yet; None if there is no such table."""
        machine, slash, rest = name.rpartition("/")
        stage, _, short = rest.rpartition(".")
        stage = stage or here
        place = machine + slash + stage
        if stage in self.modules and place not in self.tables:
            return UNMEASURED if short in {"limits", *self.modules[stage].draw} else None
        return (self.tables[""] | self.tables.get(place, {})).get(short)


def _read(path: Path) -> bytes | None:
    return path.read_bytes().replace(b"\r\n", b"\n") if path.is_file() else None


def report(root: Path, modules: Mapping[str, Any], check: bool) -> int:
    """Check or update the reports below `root` and print what was found; returns the exit
    status."""
    result = Report(root, modules, check)
    stale = result.stale
    for path in stale:
        if not check:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(result.files[path])
        print(f"{'stale' if check else 'written'}: {path.as_posix()}")
    for problem in result.problems:
        print(f"problem: {problem}")
    for note in result.notes:
        print(f"note: {note}")
    if check and stale:
        print(f"Update them: {UPDATE}")
    if not stale and not result.problems:
        print(f"All {len(result.files)} files of the reports match the results.")
    return 1 if result.problems or (check and stale) else 0


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "reports.draw",
        "Draws every chart and writes every table of the reports from the results in reports/.",
        "  python -m reports.draw            after a benchmark\n"
        "  python -m reports.draw --check    exit status 1 if anything is stale",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; name what is stale or missing"
    )
    return report(paths.ROOT, benchmarks(), parser.parse_args(argv).check)


if __name__ == "__main__":
    cli.run(main)
