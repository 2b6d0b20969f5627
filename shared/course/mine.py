"""The student's copy of a stage: where it is, how it is made, how it is laid over the reference.

A copy holds the files of a stage that have tasks, with the bodies of the tasks' functions removed
and nothing else changed. It is cut out of the reference by line numbers, so that no second tree of
exercises can drift away from the code.

A module in the copy is loaded from there; everything else of the stage, tests included, comes from
the reference. A function that is still empty raises its error only in tests that judge it; in all
others the reference's body runs in its place. So an open task breaks no other task, and a student
may begin with any of them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any

from .. import paths
from ..errors import UserError
from ..task import Task

# All copies and their backups. The variable is for tests, and for students who keep them elsewhere.
HOME = Path(os.environ.get("STAIRCASE_MINE") or paths.ROOT / "mine")

Function = ast.FunctionDef | ast.AsyncFunctionDef


# ---- stages and tasks ---------------------------------------------------------------------------


def find_stage(text: str) -> str:
    """The stage named by `text`: stage04_continuous, stage04, 04 or 4.

    Raises UserError if there is none.
    """
    known = paths.discover()
    wanted = text.strip().rstrip("/\\")
    for name in known:
        if wanted in (name, name[:7]) or wanted.zfill(2) == name[5:7]:
            return name
    raise UserError(f"There is no stage '{text[:40]}': the stages are {', '.join(known)}.")


def tasks(stage: str) -> tuple[Task, ...]:
    """The tasks of a stage, in order; none if it has no `tasks.py`."""
    if not (paths.ROOT / stage / "tasks.py").is_file():
        return ()
    listed: tuple[Task, ...] = importlib.import_module(f"{stage}.tasks").TASKS
    return listed


def find_task(stage: str, number: int) -> Task:
    """Raises UserError if the stage has no such task."""
    for task in tasks(stage):
        if task.number == number:
            return task
    raise UserError(f"{stage} has no task {number}: its tasks are 1 to {len(tasks(stage))}.")


def label(stage: str, task: Task) -> str:
    """The task's name in messages: "stage04 task 2"."""
    return f"{stage[:7]} task {task.number}"


def command(words: str, stage: str, *rest: object) -> str:
    """A command on a stage, to show: "python -m shared.course.exercise start stage04"."""
    return " ".join(map(str, ["python -m shared.course.exercise", words, stage[:7], *rest]))


def message(stage: str, task: Task) -> str:
    """The error of an empty function."""
    return f"{label(stage, task)}: {task.title}; {command('hint', stage, task.number)}"


def errors(stage: str, task: Task) -> list[str]:
    """The errors with a text that the reference raises in the task's functions: tests may look for
    these texts."""
    tree = parse(read(paths.ROOT / stage / task.file))
    messages: list[str] = []
    for function in filter(None, (find_function(tree, name) for name in task.functions)):
        raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise)]
        calls = [node for node in raised if isinstance(node, ast.Call) and node.args]
        texts = [node for node in calls if isinstance(node.args[0], ast.Constant | ast.JoinedStr)]
        messages += [ast.unparse(node) for node in sorted(texts, key=lambda node: node.lineno)]
    return messages


# ---- copies -------------------------------------------------------------------------------------


def folder(stage: str) -> Path:
    """The place of the student's copy of a stage, which need not exist."""
    return HOME / stage


def files(stage: str) -> list[str]:
    """The files of a stage that have tasks."""
    return sorted({task.file for task in tasks(stage)})


def modules(copy: Path) -> list[str]:
    """The Python files of a copy, "router/routing.py", in order."""
    return sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*.py"))


def dotted(file: str) -> str:
    """The module in a file of a stage: "router.routing" for "router/routing.py"."""
    return file.removesuffix(".py").replace("/", ".")


def existing(stage: str) -> Path:
    """The student's copy of a stage. Raises UserError if there is none."""
    if not folder(stage).is_dir():
        advice = f"make one with `{command('start', stage)}`"
        raise UserError(f"There is no copy of {stage}: {advice}.")
    return folder(stage)


def start(stage: str) -> Path:
    """Make the copy of a stage, and return its folder.

    Raises UserError if there is one already, or if the stage has no tasks.
    """
    if not tasks(stage):
        raise UserError(f"{stage} has no tasks.")
    target = folder(stage)
    if target.exists():
        raise UserError(
            f"There is a copy of {stage} in {target} already: continue with it, or begin again "
            f"with `{command('reset', stage)}`, which keeps a backup."
        )
    target.mkdir(parents=True)
    for name in files(stage):
        write(target / name, fresh(stage, name))
    return target


def fresh(stage: str, file: str) -> str:
    """The reference's `file` with the functions of all its tasks emptied."""
    source = read(paths.ROOT / stage / file)
    for task in tasks(stage):
        if task.file == file:
            source = emptied(source, stage, task)
    return source


def backup(stage: str) -> Path:
    """Copy the student's copy of a stage to a new folder among the backups, and return that."""
    when = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        target = HOME / "backups" / f"{stage}-{when}{'' if number == 1 else f'-{number}'}"
        if not target.exists():
            shutil.copytree(folder(stage), target)
            return target
    raise UserError(f"There are 1,000 backups of {stage} from this second: wait for the next one.")


def reset(stage: str, task: Task | None = None) -> Path:
    """Begin again with a whole copy, or with the functions of one task; returns the backup made
    before.

    Raises UserError if there is no copy, or if one task is to be emptied in a file that is not
    Python.
    """
    target = existing(stage)
    new = {name: fresh(stage, name) for name in files(stage)}
    if task is not None:
        try:
            new = {task.file: emptied(read(target / task.file), stage, task)}
        except (OSError, SyntaxError, LookupError) as error:
            why = str(error).replace("<unknown>, ", "")
            raise UserError(
                f"This task alone cannot be emptied in {task.file} ({why}): repair the file, or "
                f"reset the whole stage with `{command('reset', stage)}`."
            ) from None
    kept = backup(stage)
    if task is None:
        for name in modules(target):
            (target / name).unlink()
    for name, source in new.items():
        write(target / name, source)
    return kept


def read(path: Path) -> str:
    """The text of a Python file, line ends as they are. Raises SyntaxError if it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SyntaxError(f"{path.name} is not UTF-8 text") from None


def write(path: Path, source: str) -> None:
    """Write with the line ends of `source`, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source.encode("utf-8"))


# ---- results ------------------------------------------------------------------------------------


def recorded(stage: str) -> dict[int, bool]:
    """Whether each task passed when it was last tested, by number; {} if the copy has changed
    since."""
    try:
        known = json.loads((HOME / "tested.json").read_text(encoding="utf-8"))[stage]
        if known["copy"] == _digest(stage):
            return {int(number): bool(passed) for number, passed in known["tasks"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # there is none, or it is not ours
    return {}


def record(stage: str, passed: Mapping[int, bool]) -> None:
    """Save the results of some tasks, and keep those of the others."""
    path = HOME / "tested.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        known = known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        known = {}
    results = {str(task): ok for task, ok in sorted((recorded(stage) | dict(passed)).items())}
    known[stage] = {"copy": _digest(stage), "tasks": results}
    path.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _digest(stage: str) -> str:
    digest = hashlib.sha256()
    for name in modules(folder(stage)):
        digest.update(name.encode() + b"\0" + (folder(stage) / name).read_bytes() + b"\0")
    return digest.hexdigest()


# ---- functions in a file ------------------------------------------------------------------------


# Python 3.11 may raise SystemError when two threads parse at once (CPython's issue 106905), and
# grading parses one file a task.
_PARSING = threading.Lock()


def parse(source: str) -> ast.Module:
    """Raises SyntaxError for everything that is not Python."""
    try:
        with _PARSING:
            return ast.parse(source)
    except (ValueError, RecursionError, MemoryError) as error:  # null characters, endless brackets
        raise SyntaxError(str(error) or "it is nested too deep") from None


def find_function(tree: ast.Module, name: str) -> Function | None:
    """The function with a qualified name, "Scheduler.schedule", in a module."""
    body: Sequence[ast.stmt] = tree.body
    *owners, last = name.split(".")
    for owner in owners:
        classes = (node for node in body if isinstance(node, ast.ClassDef))
        body = next((node.body for node in classes if node.name == owner), [])
    return next((node for node in body if isinstance(node, Function) and node.name == last), None)


def emptied(source: str, stage: str, task: Task, body: Sequence[str] | None = None) -> str:
    """`source` with other bodies in the task's functions: `body`, or the task's error. All else,
    signatures and docstrings included, stays byte for byte.

    Raises SyntaxError for what is not Python, and LookupError if a function is missing.
    """
    title, _, hint = message(stage, task).rpartition("; ")
    error = ["raise NotImplementedError(", f'    "{title}; "', f'    "{hint}"', ")"]
    for name in task.functions:
        node = find_function(parse(source), name)
        if node is None:
            raise LookupError(f"there is no {name}")
        lines = source.split("\n")
        old = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if lines[node.body[0].lineno - 1][: node.body[0].col_offset].strip():
            raise LookupError(f"{name} has its body on the line of its signature")
        # Lines are counted from 1. Comments above the first statement go too: they would give away
        # the solution.
        first = _first_line(old[0]) if old else (node.end_lineno or 0) + 1
        while lines[first - 2].strip() == "" or lines[first - 2].lstrip().startswith("#"):
            first -= 1
        new = list(error if body is None else body)
        yields = any(isinstance(inner, ast.Yield) for inner in ast.walk(node))
        if isinstance(node, ast.AsyncFunctionDef) and yields:
            new.append("yield  # so that it is still an async generator")
        ending = "\r" if lines[node.lineno - 1].endswith("\r") else ""
        indent = " " * (node.col_offset + 4)
        lines[first - 1 : node.end_lineno] = [f"{indent}{line}{ending}" for line in new]
        source = "\n".join(lines)
    return source


def _first_line(statement: ast.stmt) -> int:
    """The first line of a statement, decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(node.lineno for node in decorators)])


def is_open(source: str, stage: str, task: Task) -> bool:
    """Whether a function of the task still raises the task's error, or a public one is missing: a
    design of one's own need not have the reference's private ones.

    Raises SyntaxError for what is not Python.
    """
    tree, prefix = parse(source), label(stage, task)
    functions = {name: find_function(tree, name) for name in task.functions}
    return any(
        _is_stub(node, prefix) if node else not name.rpartition(".")[2].startswith("_")
        for name, node in functions.items()
    )


def _is_stub(node: Function, prefix: str) -> bool:
    for statement in node.body:
        if isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call):
            first = statement.exc.args[0] if statement.exc.args else None
            if isinstance(first, ast.Constant) and str(first.value).startswith(f"{prefix}:"):
                return True
    return False


# ---- laid over the reference --------------------------------------------------------------------


@dataclass
class Overlay:
    """A copy that is laid over its stage in this process. The stage must be imported afterwards.

    An open task's functions are the student's while its number is in `judged`, and otherwise the
    reference's. With `only`, the functions of all other tasks are the reference's, too, except for
    the numbers in it.
    """

    stage: str
    folder: Path
    files: tuple[str, ...]
    only: frozenset[int] | None = None
    judged: set[int] = field(default_factory=set)

    def takes_mine(self, task: Task, empty: bool) -> bool:
        """Whether the student's functions of `task` run now."""
        if task.number in self.judged:
            return True
        return not empty if self.only is None else task.number in self.only


ACTIVE: dict[str, Overlay] = {}  # by stage


def overlay(
    stage: str,
    source: Path | None = None,
    files: Sequence[str] | None = None,
    only: frozenset[int] | None = None,
) -> Overlay:
    """Lay the copy in `source` (default: the student's) over its stage, until this process ends.

    files: only these of the copy; None: all its modules. only: the tasks whose functions are the
    student's, judged or not: see Overlay. Raises UserError if there is no copy, and RuntimeError
    if the stage is loaded already.
    """
    source = existing(stage) if source is None else source
    # Never from a copy: the package, which is loaded already, and its tasks and tests.
    never = {"__init__", "tasks", "tests", "conftest"}
    chosen = tuple(
        name
        for name in modules(source)
        if not {*PurePosixPath(name).with_suffix("").parts} & never
        and (files is None or name in files)
    )
    late = [name for name in chosen if f"{stage}.{dotted(name)}" in sys.modules]
    if late or stage in ACTIVE:
        loaded = ", ".join(late) or "another overlay"
        raise RuntimeError(f"{stage} cannot be overlaid: {loaded} is loaded already")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    ACTIVE[stage] = Overlay(stage, source, chosen, only)
    return ACTIVE[stage]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the overlays before all other finders."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        stage, _, name = fullname.partition(".")
        active = ACTIVE.get(stage)
        module = f"{name.replace('.', '/')}.py"
        if active is None or module not in active.files:
            return None
        file = str(active.folder / module)
        loader = _Loader(fullname, file, active)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, active: Overlay) -> None:
        super().__init__(fullname, path)
        self.active = active

    def get_code(self, fullname: str) -> CodeType:
        # No compiled file beside the source: it could hide the second of two edits in one second.
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _fill(module, self.active, Path(self.path))


def _fill(module: ModuleType, active: Overlay, path: Path) -> None:
    """Put the reference's functions beside the student's, for the tests of other tasks."""
    name = path.relative_to(active.folder).as_posix()
    source, original = read(path), paths.ROOT / active.stage / name
    tree = ast.parse(read(original), str(original))
    for task in tasks(active.stage):
        if task.file != name:
            continue
        empty = is_open(source, active.stage, task)
        wanted = functools.partial(active.takes_mine, task, empty)
        for function in task.functions:
            *owners, last = function.split(".")
            owner: Any = module
            for part in owners:
                owner = getattr(owner, part, None)
            node = find_function(tree, function)
            if owner is None or node is None:
                continue  # the class is missing: an error where it is used
            mine = vars(owner).get(last, _missing(active.stage, task, function))
            reference = _reference(node, original, module, owner)
            either = _either(mine, reference, wanted)
            setattr(owner, last, either)
            for table in [v for v in vars(module).values() if isinstance(v, dict)]:
                table.update({key: either for key, value in table.items() if value is mine})


def _missing(stage: str, task: Task, name: str) -> Callable[..., Any]:
    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{message(stage, task)}; {task.file} has no {name}")

    return absent


def _reference(node: Function, path: Path, module: ModuleType, owner: Any) -> Any:
    """The reference's function, decorators included, with the globals of the student's module.

    It is made inside a function with a variable `__class__`, because super() looks there for its
    class. Annotations are not evaluated: compile() inherits that from this file.
    """
    maker = ast.parse(f"def make(__class__):\n    pass\n    return {node.name}").body[0]
    assert isinstance(maker, ast.FunctionDef)
    maker.body[0] = node
    scratch: dict[str, Any] = {}
    exec(compile(ast.Module([maker], []), str(path), "exec"), vars(module), scratch)
    return scratch["make"](owner)


def _either(mine: Any, reference: Any, wanted: Callable[[], bool]) -> Any:
    """A function, method or property that runs `mine` when it is wanted, else `reference`."""
    if isinstance(reference, property):
        getter = _either(_plain(mine), reference.fget, wanted)
        return property(getter, reference.fset, reference.fdel, reference.__doc__)
    if isinstance(reference, staticmethod | classmethod):
        return type(reference)(_either(_plain(mine), reference.__func__, wanted))
    mine = _plain(mine)

    @functools.wraps(mine if hasattr(mine, "__code__") else reference)
    def either(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return (mine if wanted() else reference)(*args, **kwargs)

    return either


def _plain(function: Any) -> Any:
    """The function inside a property, a static method or a class method."""
    if isinstance(function, property):
        return function.fget
    return function.__func__ if isinstance(function, staticmethod | classmethod) else function
