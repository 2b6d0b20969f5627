"""Draws all charts and writes all tables of the reports from the results in reports/: `python -m shared.bench.report`.

Numbers are never typed by hand. A stage's `benchmark.py` turns its results into tables (markdown) and charts (figures):

    tables(results) -> {name: markdown}         charts(results) -> {stem: function that returns a Figure}

Tables go between markers on lines of their own, in README.md and in a stage's README.md and REPORT.md:

    <!-- table: speed -->                       the stage's own table, or the only one of that name
    <!-- table: stage02_kv_cache.speed -->      a stage's table, wherever the marker stands
    <!-- table: speed @ nvidia-h200 -->         from another machine than the default one
    <!-- table: stages -->                      all stages: question, result in one line, file to open first
    <!-- table: references -->                  what other projects say, from reports/references.json, and our counterpart
    <!-- /table -->

Charts go to reports/<machine>/<stage>_<stem>.svg. `--check` writes nothing and says what a run without it would change.
"""

from __future__ import annotations

import ast
import importlib
import json
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

from .. import charts, cli, measure, paths
from ..errors import UserError
from . import staircase

TABLE = re.compile(r"^<!-- table: (?P<name>[\w.-]+)(?: @ (?P<machine>[\w.-]+))? -->$")
END = "<!-- /table -->"
# `![words](path)`, `[words](path)` and src="path", with a path into reports/
LINK = re.compile(r"""(?:\]\(|src=")([^)"#\s]*reports/[^)"#\s]+)""")

# (machine, stage) -> name -> markdown. The machine None is the one whose numbers the texts show, the stage "" is all of them.
Tables = dict[tuple[str | None, str], dict[str, str]]


@dataclass
class Build:
    """Every file as it should be, by path from the root, and what stands in the way."""

    files: dict[Path, bytes] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def stale(self, root: Path) -> list[Path]:
        """The files that are absent or differ. Git may have given text files Windows' line ends: they do not count."""
        return [path for path, content in self.files.items() if _read(root / path) != content]


def benchmarks() -> dict[str, Any]:
    """The benchmark module of every stage that has one, in reading order, and the staircase, which compares them."""
    names = [name for name in paths.discover() if (paths.ROOT / name / "benchmark.py").exists()]
    return {name: importlib.import_module(f"{name}.benchmark") for name in names} | {
        staircase.KIND: staircase
    }


def drawn_with() -> dict[str, str]:
    """What the bytes of a chart depend on beside the data."""
    return {"matplotlib": matplotlib.__version__, "system": f"{sys.platform} {platform.machine()}"}


def build(root: Path, modules: Mapping[str, Any], check: bool = False) -> Build:
    """What the reports below `root` should be, given the stages' benchmark `modules`.

    To `check`, charts that another version or system drew are only looked for, since their bytes would differ. The default
    machine, whose numbers the texts show, is kept in reports/machines.json; at first it is the first in the alphabet. A stage
    that has not run there shows the numbers of another machine.
    """
    result = Build()
    reports = root / "reports"
    files = sorted(path for path in reports.glob("*/*.json") if path.stem in modules)
    for path in sorted(set(reports.glob("*/*.json")) - set(files)):
        result.problems.append(
            f"{_name(path, root)} belongs to no stage with a benchmark: delete it"
        )
    if not files:
        result.notes.append("there are no results in reports/ yet")
    settings = _settings(reports / "machines.json")
    names = sorted({path.parent.name for path in files})
    default = settings.get("default") if settings.get("default") in names or not names else names[0]
    drawers = settings.get("charts", drawn_with()) if check else drawn_with()
    draw = drawers == drawn_with()
    if files and not draw:
        theirs, ours = (" on ".join(each.values()) for each in (drawers, drawn_with()))
        result.notes.append(
            f"charts were not compared: matplotlib {theirs} drew them, and here is {ours}"
        )
    # A stage that has not run on the default machine shows what another one measured.
    homes = {path.stem: path.parent.name for path in reversed(files)}
    homes |= {path.stem: path.parent.name for path in files if path.parent.name == default}
    tables: Tables = {}
    headlines: dict[str, str] = {}
    folders = sorted(path.parent for path in root.glob("stage[0-9][0-9]_*/__init__.py"))
    pictures: set[Path] = set()
    for path in files:
        stage, machine = path.stem, path.parent.name
        try:
            results = measure.load(path)
        except UserError as error:
            result.problems.append(str(error))
            continue
        tables[machine, stage] = modules[stage].tables(results)
        if machine == homes[stage] and root / stage in folders:
            headlines[stage] = modules[stage].headline(results)
        for stem, function in modules[stage].charts(results).items():
            picture = Path("reports") / machine / f"{stage}_{stem}.svg"
            pictures.add(picture)
            if draw:
                result.files[picture] = charts.render(function())
            elif not (root / picture).exists():
                result.problems.append(
                    f"{picture.as_posix()} does not exist: run python -m shared.bench.report"
                )
    for path in sorted(reports.glob("*/*.svg")):
        if path.relative_to(root) not in pictures:
            result.problems.append(f"{_name(path, root)} is drawn by no benchmark: delete it")
    if files:
        content = {"default": default, "charts": drawers}
        result.files[Path("reports/machines.json")] = (
            json.dumps(content, indent=1) + "\n"
        ).encode()
    for stage, machine in sorted(homes.items()):
        if (machine, stage) in tables:
            tables[None, stage] = tables[machine, stage]
    if folders:
        tables[None, ""] = {
            "stages": _stages_table(folders, headlines, result),
            "references": _references_table(reports / "references.json", headlines, result),
        }
    for path in _texts(root):
        _build_text(path, root, tables, pictures, result)
    return result


def _build_text(path: Path, root: Path, tables: Tables, pictures: set[Path], result: Build) -> None:
    """Add one text to `result`, with its tables filled in; complain of markers and links that lead nowhere."""
    lines, fill = [], None
    text = _read(path) or b""
    for number, line in enumerate(text.decode("utf-8").split("\n"), 1):
        where = f"{_name(path, root)}, line {number}"
        marker = TABLE.match(line)
        if marker and fill is None:
            fill = _find(marker["name"], path.parent.name, marker["machine"], tables)
            if isinstance(fill, Missing):
                result.problems.append(f"{where}: {fill.why}")
        elif line == END and fill is not None:
            lines += [] if isinstance(fill, Missing) else ["", *fill.strip("\n").split("\n"), ""]
            fill = None
        elif marker or line == END:
            result.problems.append(
                f"{where}: '{line}' where {'the table before has not ended' if marker else 'no table began'}"
            )
            return
        elif fill is not None and not isinstance(fill, Missing):
            continue  # the table as it was
        lines.append(line)
        for link in LINK.findall(line):
            target = (path.parent / link).resolve()
            known = (
                target.relative_to(root.resolve()) in pictures
                if target.is_relative_to(root.resolve())
                else False
            )
            if not known and not target.is_file():
                result.problems.append(f"{where}: {link} does not exist")
    if fill is not None:
        result.problems.append(f"{_name(path, root)}: the last table has no '{END}'")
    else:
        result.files[path.relative_to(root)] = "\n".join(lines).encode()


def _stages_table(folders: list[Path], headlines: Mapping[str, str], result: Build) -> str:
    """The table of the top README. What a stage says of itself is in its __init__.py; `headlines` are those of the results."""
    lines = ["| stage | question | result | open first |", "|---|---|---|---|"]
    for folder in folders:
        about = _constants(folder / "__init__.py")
        for name in ("QUESTION", "FIRST_FILE"):
            if not about.get(name):
                result.problems.append(f"{folder.name}/__init__.py does not say its {name}")
        question, first = about.get("QUESTION", ""), about.get("FIRST_FILE", "")
        if not (folder / first).exists():
            result.problems.append(
                f"{folder.name}/__init__.py names the file {first}, which does not exist"
            )
        stage, opened = f"[{folder.name}]({folder.name}/)", f"[`{first}`]({folder.name}/{first})"
        lines.append(
            f"| {stage} | {question} | {headlines.get(folder.name, 'not measured yet')} | {opened} |"
        )
    return "\n".join(lines)


def _references_table(path: Path, headlines: Mapping[str, str], result: Build) -> str:
    """What others say of engines like these, what to know about it, and what the stage that does the same found here."""
    lines = ["| project | says | on | what to know | our counterpart |", "|---|---|---|---|---|"]
    try:
        for each in json.loads(_read(path) or b"[]"):
            ours = f"[{each['stage']}](../{each['stage']}/REPORT.md): {headlines.get(each['stage'], 'not measured yet')}"
            lines.append(
                f"| {each['project']} | {each['says']} | {each['on']} | {each['caveat']} | {ours} |"
            )
    except (ValueError, TypeError, KeyError) as error:
        result.problems.append(
            f"{path.name} is damaged ({error}): it is a list of project, says, on, caveat and stage"
        )
    return "\n".join(lines)


def _constants(path: Path) -> dict[str, str]:
    """The texts that a module names at its top level, read without running it."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return found


@dataclass(frozen=True)
class Missing:
    """A table that cannot be filled in, and why."""

    why: str


def _find(name: str, here: str, machine: str | None, tables: Tables) -> str | Missing:
    """The table `name` as seen from the folder `here`; `machine` None: from the one whose numbers the texts show."""
    found = {
        stage: each[name]
        for (where, stage), each in tables.items()
        if where == machine and name in each
    }
    stage, _, own = name.partition(".")
    if own in tables.get((machine, stage), {}):
        return tables[machine, stage][own]
    if here in found:
        return found[here]
    if len(found) > 1:
        return Missing(
            f"the table '{name}' is one of {' and '.join(found)}: write {next(iter(found))}.{name}"
        )
    if not found:
        return Missing(
            f"there is no table '{name}'{f' from {machine}' if machine else ''}: run the stage's benchmark, or mend the name"
        )
    return next(iter(found.values()))


def _texts(root: Path) -> list[Path]:
    """The texts that may hold tables."""
    found = [
        root / "README.md",
        *root.glob("stage[0-9][0-9]_*/README.md"),
        *root.glob("stage[0-9][0-9]_*/REPORT.md"),
    ]
    return sorted(path for path in [*found, root / "reports" / "README.md"] if path.exists())


def _settings(path: Path) -> dict[str, Any]:
    """What reports/machines.json says; {} if it is absent. UserError if it is damaged."""
    content = _read(path)
    if content is None:
        return {}
    try:
        settings = json.loads(content)
        return {"default": str(settings["default"]), "charts": dict(settings["charts"])}
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged: delete it and run python -m shared.bench.report.") from None


def _read(path: Path) -> bytes | None:
    return path.read_bytes().replace(b"\r\n", b"\n") if path.is_file() else None


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def update(root: Path, result: Build) -> list[Path]:
    """Write the files that are stale; returns them."""
    stale = result.stale(root)
    for path in stale:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(result.files[path])
    return stale


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "shared.bench.report",
        "Draws every chart and writes every table of the reports anew from the results in reports/.",
        "  python -m shared.bench.report            after a benchmark\n"
        "  python -m shared.bench.report --check    is anything stale? then exit status 1",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; name what is stale or missing"
    )
    return report(paths.ROOT, benchmarks(), parser.parse_args(argv).check)


def report(root: Path, modules: Mapping[str, Any], check: bool) -> int:
    """Check or update the reports below `root` and say what was found; returns the exit status."""
    result = build(root, modules, check)
    stale = result.stale(root) if check else update(root, result)
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path.as_posix()}")
    for problem in result.problems:
        print(f"problem: {problem}")
    for note in result.notes:
        print(f"note: {note}")
    if check and stale:
        print("Run python -m shared.bench.report to bring them up to date.")
    if not stale and not result.problems:
        print(f"All {len(result.files)} files of the reports are as the results say.")
    return 1 if result.problems or (check and stale) else 0


if __name__ == "__main__":
    cli.run(main)
