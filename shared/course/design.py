"""The open design: one file of a stage, written from its signatures alone, and its line on the
leaderboard. OPEN_DESIGN.md is the assignment.

`python -m shared.course.exercise design stage04 scheduler.py` empties the whole file, not only the
functions of tasks. The contract suite judges what replaces it, with --mine as usual. `line` runs
the staircase's workload through the copy and through the reference in turn, and proves every token.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from .. import paths
from ..errors import UserError
from . import grading, mine
from .capstone import OURS, proved_rates
from .judge import Judge


def signatures(source: str) -> str:
    """`source` with an error for the body of each public function, and without private ones.
    Imports, fields, docstrings and `__init__`, which sets the attributes that tests read, stay."""
    lines = source.split("\n")
    tree = mine.parse(source)
    owners: list[ast.Module | ast.ClassDef] = [tree]
    owners += [node for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = [f for owner in owners for f in owner.body if isinstance(f, ast.FunctionDef)]
    for node in sorted(functions, key=lambda node: -node.lineno):
        if node.name == "__init__":
            continue
        first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        start = body[0].lineno if body else (node.end_lineno or 0) + 1
        error = " " * (node.col_offset + 4) + f'raise NotImplementedError("{node.name}")'
        private = node.name.startswith("_") and not node.name.startswith("__")
        begin, new = (first, list[str]()) if private else (start, [error])
        lines[begin - 1 : node.end_lineno] = new
    return "\n".join(lines).rstrip() + "\n"


def start(stage: str, file: str) -> Path:
    """Write the signatures of a `file` with tasks into the student's copy of a stage, which is
    begun if there is none, and otherwise kept as a backup first.

    Raises UserError for a file without tasks.
    """
    if file not in mine.files(stage):
        files = ", ".join(mine.files(stage)) or "none"
        raise UserError(f"{file} of {stage} has no tasks; these files have: {files}.")
    if mine.folder(stage).is_dir():
        mine.backup(stage)
    else:
        mine.start(stage)
    path = mine.folder(stage) / file
    mine.write(path, signatures(mine.read(paths.ROOT / stage / file)))
    return path


def line(judge: Judge, submission: Path, stage: str, plan: Any, rounds: int) -> str:
    """The design's line: the files that differ from the reference's with their lines of code, tok/s
    on the workload of `plan`, the share of the reference's, and the proof.

    Raises UserError if there is no such copy, or if its engine gives wrong tokens or none.
    """
    from reports import staircase  # it imports stages, which `exercise` must not do at its start

    folder = grading.submitted(submission, stage, alone=False)
    if folder is None:
        begin = mine.command("design", stage, "FILE")
        raise UserError(f"There is no {stage} in {submission}: begin with `{begin}`.")
    sources = {}
    for name in mine.modules(folder):
        source, why = grading.file_of(folder, name)
        if why:
            raise UserError(why)
        sources[name] = source.decode("utf-8-sig", "replace")
    written = [
        f"{name} ({sum(map(bool, map(str.strip, source.splitlines())))} lines)"
        for name, source in sources.items()
        if name not in mine.files(stage) or source != mine.fresh(stage, name)
    ]
    files = {f"{stage}/{name}": source.encode() for name, source in sources.items()}
    rates = proved_rates(judge, [stage], files, plan, rounds)
    rate, tokens = rates[stage], sum(staircase.workload(plan)[1])
    return (
        f"{stage}, {', '.join(written) or 'nothing written'}: {rate:.1f} tok/s, "
        f"{rate / rates[OURS]:.0%} of the reference's, all {tokens} tokens proved"
    )
