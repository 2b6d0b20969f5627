"""Draws all charts and writes all tables of the reports from the results in reports/:
`python -m shared.bench.report`.

No number is typed by hand. A benchmark turns its results into tables (markdown), charts (figures)
and a headline. Tables go between markers on lines of their own, in README.md, reports/README.md,
and a stage's README.md and REPORT.md:

    <!-- table: speed -->                       the stage's own table, or the only one of that name
    <!-- table: stage02_kv_cache.speed -->      a stage's table, in any text
    <!-- table: speed @ nvidia-h200 -->         from another machine than the default one
    <!-- table: stages -->                      all stages: question, result, file to open first
    <!-- table: references -->                  other projects' claims, from reports/references.json
    <!-- /table -->

Charts go to reports/<machine>/<stage>_<name>.svg. `--check` writes nothing and names what a run
without it would change.
"""

from __future__ import annotations

import ast
import importlib
import json
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from .. import charts, cli, measure, paths
from ..errors import UserError
from . import rows, staircase
from .peers import compare, shapes

BEGIN, END = "<!-- table: ", "<!-- /table -->"  # on lines of their own
TABLE = re.compile(
    rf"^(?P<begin>{BEGIN}(?P<name>[\w.-]+)(?: @ (?P<machine>[\w.-]+))? -->)\n"
    rf"(?:(?!<!-- /?table).*\n)*{END}$",
    re.MULTILINE,
)
FIGURES = "figures"  # in reports/: pictures of mechanisms, drawn by `shared.course.figures`
UPDATE = "run python -m shared.bench.report"
UNMEASURED = "not measured yet"


def benchmarks() -> dict[str, Any]:
    """Every stage's benchmark in reading order, the staircase, which compares them, other engines
    beside them, and the cross-check of the load test."""
    names = [name for name in paths.discover() if (paths.ROOT / name / "benchmark.py").exists()]
    found = {name: importlib.import_module(f"{name}.benchmark").BENCHMARK for name in names}
    found |= {module.KIND: module.BENCHMARK for module in (staircase, compare, shapes)}
    for path in sorted(paths.ROOT.glob("stage*/crosscheck.py")):
        module = importlib.import_module(f"{path.parent.name}.crosscheck")
        found[module.KIND] = module.BENCHMARK
    return found


def drawn_with() -> dict[str, str]:
    """What the bytes of a chart depend on beside the data."""
    return {"matplotlib": matplotlib.__version__, "system": f"{sys.platform} {platform.machine()}"}


class Report:
    """Every file below `root` as it should be, by path from there, and what prevents that.

    To `check`, charts that another version or system drew must only exist, since their bytes would
    differ. The default machine, whose numbers the texts show, is kept in reports/machines.json; at
    first it is the first in the alphabet. A stage that has not run there shows another machine's.
    """

    def __init__(self, root: Path, modules: Mapping[str, Any], check: bool = False) -> None:
        self.root, self.modules = root, modules
        self.files: dict[Path, bytes] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        # (machine, stage) -> name -> markdown. The machine None is the one whose numbers the texts
        # show, the stage "" is all of them.
        self.tables: dict[tuple[str | None, str], dict[str, str]] = {}
        self.headlines: dict[str, str] = {}
        self.pictures: set[Path] = set()
        self.folders = sorted(path.parent for path in root.glob("stage[0-9][0-9]_*/__init__.py"))
        every = sorted(root.glob("reports/*/*.json"))
        for path in every:
            if path.stem not in modules:
                unknown = f"{self._name(path)} belongs to no stage with a benchmark: delete it"
                self.problems.append(unknown)
        settings = _settings(root / "reports" / "machines.json")
        self._results([path for path in every if path.stem in modules], settings, check)
        if self.folders:
            own = {"stages": self._stages_table(), "references": self._references_table()}
            self.tables[None, ""] = own
        for pattern in ("README.md", "reports/README.md", "stage[0-9][0-9]_*/RE*.md"):
            for path in sorted(root.glob(pattern)):  # the texts that may hold tables
                self._text(path)

    @property
    def stale(self) -> list[Path]:
        """The files that are absent or differ, line ends apart: git may have changed them."""
        return [path for path, wanted in self.files.items() if _read(self.root / path) != wanted]

    def write(self) -> list[Path]:
        """Write the files that are stale; returns them."""
        stale = self.stale
        for path in stale:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_bytes(self.files[path])
        return stale

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    # ---- results ----------------------------------------------------------------------------

    def _results(self, found: list[Path], settings: Mapping[str, Any], check: bool) -> None:
        """Tables, charts and headlines."""
        if not found:
            self.notes.append("there are no results in reports/ yet")
            return
        machines = sorted({path.parent.name for path in found})
        chosen = settings.get("default")
        default = chosen if chosen in machines else machines[0]
        drawers = settings.get("charts", drawn_with()) if check else drawn_with()
        if drawers != drawn_with():
            theirs, ours = (" on ".join(drawn.values()) for drawn in (drawers, drawn_with()))
            self.notes.append(f"charts were not compared: drawn by matplotlib {theirs}, not {ours}")
        homes = {path.stem: path.parent.name for path in reversed(found)}
        homes |= {path.stem: path.parent.name for path in found if path.parent.name == default}
        for path in found:
            stage, machine = path.stem, path.parent.name
            try:
                results = measure.load(path)
            except UserError as error:
                self.problems.append(str(error))
                continue
            self.tables[machine, stage] = self.modules[stage].tables(results)
            if machine == homes[stage]:
                self.tables[None, stage] = self.tables[machine, stage]
                self.headlines[stage] = self.modules[stage].headline(results)
            for name, draw in self.modules[stage].charts(results).items():
                picture = Path("reports") / machine / f"{stage}_{name}.svg"
                self.pictures.add(picture)
                if drawers == drawn_with():
                    self.files[picture] = charts.render(draw())
                elif not (self.root / picture).exists():
                    self.problems.append(f"{picture.as_posix()} does not exist: {UPDATE}")
        for path in sorted(self.root.glob("reports/*/*.svg")):
            drawn = path.relative_to(self.root) in self.pictures
            if not drawn and path.parent.name != FIGURES:
                self.problems.append(f"{self._name(path)} is drawn by no benchmark: delete it")
        content = json.dumps({"default": default, "charts": drawers}, indent=1) + "\n"
        self.files[Path("reports/machines.json")] = content.encode()

    def _stages_table(self) -> str:
        """The table of the top README: what each stage's __init__.py tells, and its headline."""
        lines = []
        for folder in self.folders:
            name, about = folder.name, _constants(folder / "__init__.py")
            for constant in ("QUESTION", "FIRST_FILE"):
                if not about.get(constant):
                    self.problems.append(f"{name}/__init__.py has no {constant}")
            first = about.get("FIRST_FILE", "")
            if not (folder / first).exists():
                self.problems.append(f"{name}/__init__.py names {first}, which does not exist")
            cells = {"stage": f"[{name}]({name}/)", "question": about.get("QUESTION", "")}
            cells["result"] = self.headlines.get(name, UNMEASURED)
            lines.append(cells | {"open first": f"[`{first}`]({name}/{first})"})
        return rows.table(lines)

    def _references_table(self) -> str:
        """What other projects claim, what to know about it, and this project's counterpart."""
        lines, header = [], "project | says | on | what to know | our counterpart"
        try:
            for one in json.loads(_read(self.root / "reports" / "references.json") or b"[]"):
                stage = one["stage"]
                ours = f"[{stage}](../{stage}/REPORT.md): {self.headlines.get(stage, UNMEASURED)}"
                cells = [*(one[key] for key in ("project", "says", "on", "caveat")), ours]
                lines.append(dict(zip(header.split(" | "), cells, strict=True)))
        except (ValueError, TypeError, KeyError) as error:
            self.problems.append(
                f"references.json is damaged ({error}): it is a list of project, says, on, caveat "
                "and stage"
            )
        return rows.table(lines, header)

    # ---- texts ------------------------------------------------------------------------------

    def _text(self, path: Path) -> None:
        """One text with its tables filled in; names markers that lead nowhere."""
        name, text = self._name(path), (_read(path) or b"").decode("utf-8")
        rest = TABLE.sub(lambda match: "\n" * match[0].count("\n"), text).split("\n")
        alone = [at for at, line in enumerate(rest) if line.startswith((BEGIN, END))]
        self.problems += [
            f"{name}, line {at + 1}: '{rest[at]}' is no part of a pair: a table stands between "
            f"'{BEGIN}NAME -->' and '{END}'"
            for at in alone
        ]

        def fill(match: re.Match[str]) -> str:
            where = f"{name}, line {text.count(chr(10), 0, match.start()) + 1}"
            found = self._find(match, path.parent.name, where)
            return f"{match['begin']}\n\n{found.strip()}\n\n{END}" if found else match[0]

        if not alone:
            self.files[path.relative_to(self.root)] = TABLE.sub(fill, text).encode()

    def _find(self, marker: re.Match[str], here: str, where: str) -> str | None:
        """The table of a marker in the folder `here`, or that it was not measured yet; None, and a
        problem, if there is none."""
        name, machine = marker["name"], marker["machine"]
        own = {stage: found for (at, stage), found in self.tables.items() if at == machine}
        stage, _, short = name.partition(".")
        if short in own.get(stage, {}):
            return own[stage][short]
        stages = [stage for stage, found in own.items() if name in found]
        if here in stages or len(stages) == 1:
            return own[here if here in stages else stages[0]][name]
        declared = (getattr(module, "draw", ()) for module in self.modules.values())
        if not (stages or machine) and any((short or name) in names for names in declared):
            return UNMEASURED
        if stages:
            why = f"the table '{name}' is one of {' and '.join(stages)}: write {stages[0]}.{name}"
        else:
            source = f" from {machine}" if machine else ""
            why = f"there is no table '{name}'{source}: run the benchmark, or correct the name"
        self.problems.append(f"{where}: {why}")
        return None


def _constants(path: Path) -> dict[str, str]:
    """The texts that a module names at its top level, read without running it."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = str(node.value.value)
    return found


def _settings(path: Path) -> dict[str, Any]:
    """The content of reports/machines.json; {} if it is absent. UserError if it is damaged."""
    content = _read(path)
    try:
        settings = json.loads(content or b"{}")
        if content is not None:
            return {"default": str(settings["default"]), "charts": dict(settings["charts"])}
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged: delete it and {UPDATE}.") from None
    return {}


def _read(path: Path) -> bytes | None:
    return path.read_bytes().replace(b"\r\n", b"\n") if path.is_file() else None


def report(root: Path, modules: Mapping[str, Any], check: bool) -> int:
    """Check or update the reports below `root` and print what was found; returns the exit
    status."""
    found = Report(root, modules, check)
    stale = found.stale if check else found.write()
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path.as_posix()}")
    for problem in found.problems:
        print(f"problem: {problem}")
    for note in found.notes:
        print(f"note: {note}")
    if check and stale:
        print(f"Update them: {UPDATE}")
    if not stale and not found.problems:
        print(f"All {len(found.files)} files of the reports match the results.")
    return 1 if found.problems or (check and stale) else 0


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "shared.bench.report",
        "Draws every chart and writes every table of the reports from the results in reports/.",
        "  python -m shared.bench.report            after a benchmark\n"
        "  python -m shared.bench.report --check    exit status 1 if anything is stale",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; name what is stale or missing"
    )
    return report(paths.ROOT, benchmarks(), parser.parse_args(argv).check)


if __name__ == "__main__":
    cli.run(main)
