"""The student's copy of a stage: where it is, how it is made, and how it is laid over the reference.

A copy holds the files of a stage that have tasks, with the bodies of the tasks' functions taken out and nothing else changed.
It is cut out of the reference by line numbers, so there is no second tree of exercises that could drift away from the code.

A module that is in the copy is loaded from there, and everything else of the stage, its tests too, from the reference. A function
that is still empty says so only where it is asked for; for everybody else the reference's body runs in its place. So an open task
breaks no other, and one may begin with any of them.
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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .. import paths
from ..errors import UserError
from ..task import Task

# All copies and their backups. The variable is for those who keep theirs elsewhere, and for tests.
HOME = Path(os.environ.get("STAIRCASE_MINE") or paths.ROOT / "mine")

Function = ast.FunctionDef | ast.AsyncFunctionDef


# ---- stages and tasks ----


def find_stage(text: str) -> str:
    """The stage that `text` names: stage04_continuous, stage04, 04 or 4. Raises UserError if there is none."""
    known = paths.discover()
    wanted = text.strip().rstrip("/\\")
    found = [
        name
        for name in known
        if name == wanted or name[:7] == wanted or name[5:7] == wanted.zfill(2)
    ]
    if not found:
        raise UserError(f"There is no stage '{text[:40]}': the stages are {', '.join(known)}.")
    return found[0]


def tasks(stage: str) -> tuple[Task, ...]:
    """The tasks of a stage, in order; none if it has no `tasks.py`."""
    if not (paths.ROOT / stage / "tasks.py").is_file():
        return ()
    found: tuple[Task, ...] = importlib.import_module(f"{stage}.tasks").TASKS
    return found


def find_task(stage: str, number: int) -> Task:
    """Raises UserError if the stage has no such task."""
    for task in tasks(stage):
        if task.number == number:
            return task
    raise UserError(f"{stage} has no task {number}: its tasks are 1 to {len(tasks(stage))}.")


def label(stage: str, task: Task) -> str:
    """How a task is called in messages: "stage04 task 2"."""
    return f"{stage[:7]} task {task.number}"


def message(stage: str, task: Task) -> str:
    """What an empty function says when it is called."""
    return f"{label(stage, task)}: {task.title}; python -m shared.course.exercise hint {stage[:7]} {task.number}"


def errors(stage: str, task: Task) -> list[str]:
    """The errors that the reference raises in the task's functions, with their words: the tests may look for these words."""
    tree = parse(read(paths.ROOT / stage / task.file))
    found: list[str] = []
    for node in filter(None, (find_function(tree, name) for name in task.functions)):
        raised = [
            each.exc
            for each in ast.walk(node)
            if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call)
        ]
        worded = [
            each
            for each in raised
            if each.args and isinstance(each.args[0], (ast.Constant, ast.JoinedStr))
        ]
        found += [ast.unparse(each) for each in sorted(worded, key=lambda each: each.lineno)]
    return found


# ---- copies ----


def folder(stage: str) -> Path:
    """Where the student's copy of a stage is, whether it is there or not."""
    return HOME / stage


def files(stage: str) -> list[str]:
    """The files of a stage that have tasks."""
    return sorted({task.file for task in tasks(stage)})


def start(stage: str) -> Path:
    """Make the copy of a stage; its folder. Raises UserError if there is one already, or nothing to do in this stage."""
    if not tasks(stage):
        raise UserError(f"{stage} has no tasks.")
    target = folder(stage)
    if target.exists():
        raise UserError(
            f"There is a copy of {stage} in {target} already: go on with that one, or begin again with "
            f"`python -m shared.course.exercise reset {stage[:7]}`, which keeps a backup."
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
    """Copy the student's copy of a stage to a new folder among the backups; that folder."""
    when = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        target = HOME / "backups" / f"{stage}-{when}{'' if number == 1 else f'-{number}'}"
        if not target.exists():
            shutil.copytree(folder(stage), target)
            return target
    raise UserError(f"There are 1,000 backups of {stage} from this second: wait for the next one.")


def reset(stage: str, task: Task | None = None) -> Path:
    """Begin again with a whole copy, or with the functions of one task; the folder of the backup that was made before.

    Raises UserError if there is no copy, or if a file of it cannot be read as Python where one task alone is to be emptied.
    """
    target = folder(stage)
    if not target.is_dir():
        raise UserError(
            f"There is no copy of {stage} to reset: `python -m shared.course.exercise start {stage[:7]}` makes one."
        )
    new = {name: fresh(stage, name) for name in files(stage)}
    if task is not None:
        try:
            new = {task.file: emptied(read(target / task.file), stage, task)}
        except (OSError, SyntaxError, LookupError) as error:
            raise UserError(
                f"{task.file} cannot be emptied at this task alone ({error}): mend it, or reset the whole stage with "
                f"`python -m shared.course.exercise reset {stage[:7]}`."
            ) from None
    kept = backup(stage)
    if task is None:
        for path in target.glob("*.py"):
            path.unlink()
    for name, source in new.items():
        write(target / name, source)
    return kept


def read(path: Path) -> str:
    """The text of a file of Python, line ends as they are. Raises SyntaxError if it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SyntaxError(f"{path.name} is not UTF-8 text") from None


def write(path: Path, source: str) -> None:
    """Line ends are written as they are."""
    path.write_bytes(source.encode("utf-8"))


# ---- what passed ----


def recorded(stage: str) -> dict[int, bool]:
    """Which tasks passed and which failed when they were last tested, by number; nothing of a copy that has changed since."""
    try:
        known = json.loads((HOME / "tested.json").read_text(encoding="utf-8"))[stage]
        return (
            {int(number): bool(passed) for number, passed in known["tasks"].items()}
            if known["copy"] == _digest(stage)
            else {}
        )
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ):  # there is none, or somebody wrote another one
        return {}


def record(stage: str, passed: Mapping[int, bool]) -> None:
    """Keep what came of some tasks, beside what is known of the others."""
    path = HOME / "tested.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        known = known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        known = {}
    tasks = {str(number): each for number, each in sorted((recorded(stage) | dict(passed)).items())}
    known[stage] = {"copy": _digest(stage), "tasks": tasks}
    path.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _digest(stage: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder(stage).glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


# ---- functions in a file ----


def parse(source: str) -> ast.Module:
    """Raises SyntaxError for everything that is not Python."""
    try:
        return ast.parse(source)
    except (
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # a null character, or brackets without end
        raise SyntaxError(str(error) or "it is nested too deep") from None


def find_function(tree: ast.Module, name: str) -> Function | None:
    """The function with a qualified name, "Scheduler.schedule", in a module."""
    body: Sequence[ast.stmt] = tree.body
    *owners, last = name.split(".")
    for owner in owners:
        body = next(
            (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner),
            [],
        )
    return next((node for node in body if isinstance(node, Function) and node.name == last), None)


def emptied(source: str, stage: str, task: Task) -> str:
    """`source` with the bodies of the task's functions taken out. Signatures and docstrings stay, and all else, byte for byte.

    Raises SyntaxError for what is not Python, and LookupError if a function is not there.
    """
    for name in task.functions:
        node = find_function(parse(source), name)
        if node is None:
            raise LookupError(f"there is no {name}")
        lines = source.split("\n")
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if lines[node.body[0].lineno - 1][: node.body[0].col_offset].strip():
            raise LookupError(f"{name} has its body on the line of its signature")
        # Lines are counted from 1. Comments above the first statement would tell too much, so they go too.
        first = _first_line(body[0]) if body else (node.end_lineno or 0) + 1
        while lines[first - 2].strip() == "" or lines[first - 2].lstrip().startswith("#"):
            first -= 1
        ending = "\r" if lines[node.lineno - 1].endswith("\r") else ""
        indent = " " * (node.col_offset + 4)
        title, _, command = message(stage, task).rpartition("; ")
        stub = f"{ending}\n".join(
            [
                f"{indent}raise NotImplementedError(",
                f'{indent}    "{title}; "',
                f'{indent}    "{command}"',
                f"{indent}){ending}",
            ]
        )
        if isinstance(node, ast.AsyncFunctionDef) and any(
            isinstance(each, ast.Yield) for each in ast.walk(node)
        ):
            stub = f"{stub}\n{indent}yield  # so that it is an async generator still{ending}"
        lines[first - 1 : node.end_lineno] = [stub]
        source = "\n".join(lines)
    return source


def _first_line(statement: ast.stmt) -> int:
    """Where a statement begins. A function or class that is decorated begins with its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def is_open(source: str, stage: str, task: Task) -> bool:
    """Whether something of the task is still to be written: a function is not there, or still has the stub's line.

    Raises SyntaxError for what is not Python.
    """
    tree = parse(source)
    return any(_is_stub(find_function(tree, name), label(stage, task)) for name in task.functions)


def _is_stub(node: Function | None, prefix: str) -> bool:
    if node is None:
        return True
    for statement in node.body:
        if isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call):
            first = statement.exc.args[0] if statement.exc.args else None
            if isinstance(first, ast.Constant) and str(first.value).startswith(f"{prefix}:"):
                return True
    return False


# ---- laid over the reference ----


@dataclass
class Overlay:
    """A copy that is laid over its stage in this process. Import the stage after `overlay` has made it, and not before.

    An open task's functions are the student's while its number is in `judged`, and the reference's otherwise. If `alone` is a
    number, that task's functions are the student's and those of all others the reference's, open or not.
    """

    stage: str
    folder: Path
    files: tuple[str, ...]
    alone: int | None = None
    judged: set[int] = field(default_factory=set)

    def takes_mine(self, task: Task, empty: bool) -> bool:
        """Whether the student's functions of `task` run now."""
        if self.alone is not None:
            return task.number == self.alone
        return not empty or task.number in self.judged


ACTIVE: dict[str, Overlay] = {}  # by stage


def overlay(
    stage: str,
    source: Path | None = None,
    files: Sequence[str] | None = None,
    alone: int | None = None,
) -> Overlay:
    """Lay the copy in `source` (default: the student's) over its stage, for as long as this process lives.

    files: only these of the copy; None: all its modules. Open tasks run the reference's bodies until somebody says what is
    judged: see Overlay. Raises UserError if there is no copy, RuntimeError if it comes too late.
    """
    source = folder(stage) if source is None else source
    if not source.is_dir():
        raise UserError(
            f"There is no {source}: `python -m shared.course.exercise start {stage[:7]}` makes a copy of the stage."
        )
    # A copy has no business with these: the first is loaded already, and a test must never come from a copy.
    found = sorted(
        path.name
        for path in source.glob("*.py")
        if path.stem not in ("__init__", "tasks", "tests", "conftest")
    )
    chosen = tuple(name for name in found if files is None or name in files)
    late = [name for name in chosen if f"{stage}.{name.removesuffix('.py')}" in sys.modules]
    if late or stage in ACTIVE:
        raise RuntimeError(
            f"{stage} cannot be overlaid: {', '.join(late) or 'another overlay'} is loaded already"
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    ACTIVE[stage] = Overlay(stage, source, chosen, alone)
    return ACTIVE[stage]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the overlays before anybody else looks for them."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        stage, _, name = fullname.partition(".")
        active = ACTIVE.get(stage)
        if active is None or f"{name}.py" not in active.files:
            return None
        file = str(active.folder / f"{name}.py")
        return importlib.util.spec_from_file_location(
            fullname, file, loader=_Loader(fullname, file, active)
        )


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, active: Overlay) -> None:
        super().__init__(fullname, path)
        self.active = active

    def get_code(self, fullname: str) -> CodeType:
        # No compiled file beside the source: a copy that is edited twice in a second must not run as it was before.
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _fill(module, self.active, Path(self.path))


def _fill(module: ModuleType, active: Overlay, path: Path) -> None:
    """Put the reference's functions beside the student's wherever the latter are not always wanted."""
    source, original = read(path), paths.ROOT / active.stage / path.name
    tree = ast.parse(read(original), str(original))
    for task in tasks(active.stage):
        if task.file != path.name:
            continue
        empty = is_open(source, active.stage, task)
        if active.takes_mine(task, empty):
            continue
        wanted = functools.partial(active.takes_mine, task, empty)
        for name in task.functions:
            *owners, last = name.split(".")
            owner: Any = module
            for each in owners:
                owner = getattr(owner, each, None)
            node = find_function(tree, name)
            if owner is None or node is None:
                continue  # the class is gone, and whoever wants it will say so
            mine = vars(owner).get(last, _missing(active.stage, task, name))
            setattr(owner, last, _either(mine, _reference(node, original, module, owner), wanted))


def _missing(stage: str, task: Task, name: str) -> Callable[..., Any]:
    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{message(stage, task)}; {task.file} has no {name}")

    return absent


def _reference(node: Function, path: Path, module: ModuleType, owner: Any) -> Any:
    """The reference's function, decorators and all, with the globals of the student's module.

    It is made inside a function with a variable `__class__`, in which super() looks for its class. Annotations are not evaluated,
    because compile() takes that over from this file.
    """
    maker = ast.parse(f"def make(__class__):\n    pass\n    return {node.name}").body[0]
    assert isinstance(maker, ast.FunctionDef)
    maker.body[0] = node
    scratch: dict[str, Any] = {}
    exec(compile(ast.Module([maker], []), str(path), "exec"), vars(module), scratch)
    return scratch["make"](owner)


def _either(mine: Any, reference: Any, wanted: Callable[[], bool]) -> Any:
    """What stands for both of two functions, methods or properties, and runs the first one when it is wanted."""
    if isinstance(reference, property):
        return property(
            _either(_plain(mine), reference.fget, wanted),
            reference.fset,
            reference.fdel,
            reference.__doc__,
        )
    if isinstance(reference, (staticmethod, classmethod)):
        return type(reference)(_either(_plain(mine), reference.__func__, wanted))
    mine = _plain(mine)

    @functools.wraps(reference)
    def either(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return (mine if wanted() else reference)(*args, **kwargs)

    return either


def _plain(function: Any) -> Any:
    """The function that a property, a static method or a class method is made of."""
    if isinstance(function, property):
        return function.fget
    return function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
