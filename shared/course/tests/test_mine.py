"""The student's copy: its contents, that no work is lost, and how it is laid over the reference."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import paths
from shared.course import mine, patience
from shared.errors import UserError
from shared.task import Task

WITH_TASKS = list(filter(mine.tasks, paths.discover()))
STAGE = "stage02_kv_cache"
OTHER = "stage04_continuous"
YIELD = "yield  # so that it is still an async generator"
STUB = re.compile(r" *raise NotImplementedError\(\r?\n.*\n.*exercise hint stage.*\n *\)\r?\n")


def test_an_endless_loop_is_ended_whatever_it_catches():
    said: list[str] = []

    def loop() -> None:
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with (
        pytest.raises(patience.Endless, match="is the loop endless"),
        patience.patience("test_loop", said.append, most=0.3, news=0.1),
    ):
        loop()
    assert said and said[0].startswith("test_loop has computed for 0 s")
    with patience.patience("waits", said.append, most=0.2, news=0.05):
        time.sleep(0.6)  # waiting is not computing


def test_what_is_traced_after_a_limit_ends():
    """As hypothesis traces; Python 3.11 looped there for ever."""
    program = (
        "import sys\nfrom shared.course.patience import patience\n"
        "with patience('test', print, 9, 9): pass\n"
        "sys.settrace(lambda *_: None)\n(lambda: None)()"
    )
    subprocess.run([sys.executable, "-c", program], cwd=paths.ROOT, check=True, timeout=60)


def test_a_stage_has_short_names_and_all_others_are_refused():
    for text in ("stage02_kv_cache", "stage02", "02", "2", "stage02_kv_cache/"):
        assert mine.find_stage(text) == STAGE
    for text in ("", "stage", "99", "stage02_", "kv_cache"):
        pytest.raises(UserError, mine.find_stage, text).match("the stages are stage01_forward, ")
    assert mine.find_task(STAGE, 1).number == 1
    pytest.raises(UserError, mine.find_task, STAGE, 99).match("its tasks are 1 to")


def test_a_test_judges_a_task_whatever_its_parameters():
    task = Task(1, "a.py", ("f",), "", "", 1, (), ("tests/test_a.py::test_one", "tests/test_b.py"))
    for test in ("a.py::test_one", "a.py::test_one[x::y]", "b.py::test_any", "b.py::A::b"):
        assert task.judged_by(f"tests/test_{test}")
    for test in ("a.py::test_one_more", "a.py::test_two", "bb.py::test_any", "one"):
        assert not task.judged_by(f"tests/test_{test}")
    assert not task.judged_by("test_one")


@pytest.mark.parametrize("stage", WITH_TASKS)
def test_a_fresh_copy_is_the_reference_without_some_bodies(stage, home):
    folder, tasks = mine.start(stage), mine.tasks(stage)
    assert folder == home / stage
    assert mine.modules(folder) == mine.files(stage)
    for file in mine.files(stage):
        reference, copy = (mine.read(place / file) for place in (paths.ROOT / stage, folder))
        own = [task for task in tasks if task.file == file]
        assert all(mine.is_open(copy, stage, task) for task in own)
        assert not any(mine.is_open(reference, stage, task) for task in own)
        # What is no stub is the reference's, in order: comments and blank lines too.
        copy, count = STUB.subn("", copy)
        assert count == sum(len(task.functions) for task in own)
        kept = iter(reference.split("\n"))
        assert [line for line in copy.split("\n") if YIELD not in line and line not in kept] == []
    assert 3 <= len(tasks) <= 8 and sum(task.points for task in tasks) == 100


SOURCE = '''\
def cached(a=1):
    # This comment would tell.
    return a

# behind it


class Thing:
    def plain(self):
        """Docstring."""

        # This comment would tell.
        return """
raise nothing
"""

    def last(self): return 2
'''


def a_task(*functions: str) -> Task:
    return Task(2, "a.py", functions, "a title", "text", 1, ("hint",), ("tests/test_a.py",))


def stub(indent: int) -> str:
    hint = '"python -m shared.course.exercise hint stage04 2"'
    lines = ("raise NotImplementedError(", '    "stage04 task 2: a title; "', f"    {hint}", ")")
    return f"\n{' ' * indent}".join(lines)


def test_bodies_go_and_the_rest_stays():
    comment = "# This comment would tell.\n"
    expected = SOURCE.replace(f"{comment}    return a\n", f"{stub(4)}\n")
    body = f'\n        {comment}        return """\nraise nothing\n"""\n'
    expected = expected.replace(body, f"        {stub(8)}\n")
    assert expected.count("raise NotImplementedError(") == 2
    empty = mine.emptied(SOURCE, OTHER, a_task("cached", "Thing.plain"))
    assert empty == expected
    windows = mine.emptied(SOURCE.replace("\n", "\r\n"), OTHER, a_task("cached", "Thing.plain"))
    assert windows == expected.replace("\n", "\r\n")
    for name in ("Thing.last", "Thing.none", "None.plain", "plain"):
        pytest.raises(LookupError, mine.emptied, SOURCE, OTHER, a_task(name)).match(name)
    # A body may begin with a decorated function, and async generators stay what they are.
    inner = "    @wrap\n    # why\n    def inner():\n        return 1\n\n    return inner\n"
    for start, body, end in (
        ("def outer():\n    'Docstring.'\n", f"\n{inner}", ""),
        ("async def outer():\n", "    async for x in y:\n        yield x\n", f"    {YIELD}\n"),
        ("async def outer():\n", "    return await x\n", ""),
    ):
        empty = mine.emptied(f"{start}{body}", OTHER, a_task("outer"))
        assert empty == f"{start}    {stub(4)}\n{end}"


def test_a_task_is_open_until_its_last_stub_is_gone():
    task = a_task("cached", "Thing.plain")
    empty = mine.emptied(SOURCE, OTHER, task)
    for source, is_open in (
        (SOURCE, False),
        (empty, True),
        (empty.replace(stub(4), "pass"), True),  # one of two
        (empty.replace(stub(4), "pass").replace(stub(8), "pass"), False),
        (empty.replace(stub(4), f"x = 1\n    {stub(4)}").replace(stub(8), "pass"), True),  # half
        (SOURCE.replace("def plain", "def renamed"), True),
        (SOURCE.replace("return a", "raise NotImplementedError('another')"), False),
    ):
        assert mine.is_open(source, OTHER, task) is is_open, source
    for source in ("def (:", "x = 1\0", "(" * 10_000):
        with pytest.raises(SyntaxError):
            mine.is_open(source, OTHER, task)


def test_reset_keeps_a_backup_every_time(home):
    for change in (mine.reset, mine.overlay):
        pytest.raises(UserError, change, STAGE).match("shared.course.exercise start stage02")
    assert STAGE not in mine.ACTIVE
    folder = mine.start(STAGE)
    pytest.raises(UserError, mine.start, STAGE).match("continue with it")
    fresh = mine.read(folder / "cache.py")
    (folder / "notes.txt").write_text("notes", encoding="utf-8")
    for work in ("work 0", "work 1", "work 2"):  # within a second
        for name in ("cache.py", "more.py"):  # a module of the student's
            mine.write(folder / name, work)
        kept = mine.reset(STAGE)
        assert mine.read(folder / "cache.py") == fresh and not (folder / "more.py").exists()
        assert {path.name for path in kept.iterdir()} >= {"notes.txt", "more.py"}
    assert (folder / "notes.txt").exists()
    backups = [mine.read(path / "cache.py") for path in (home / "backups").iterdir()]
    assert sorted(backups) == ["work 0", "work 1", "work 2"]


def test_reset_of_one_task_leaves_the_others_and_a_broken_file(home):
    folder = mine.start(STAGE)
    tasks = [task for task in mine.tasks(STAGE) if task.file == "cache.py"]
    mine.write(folder / "cache.py", "def (:")
    with pytest.raises(UserError, match=r" \(line 1\)\): repair the file, or reset"):
        mine.reset(STAGE, tasks[0])
    assert mine.read(folder / "cache.py") == "def (:" and not (home / "backups").exists()
    mine.write(folder / "cache.py", mine.read(paths.ROOT / STAGE / "cache.py") + "\n# mine\n")
    kept = mine.reset(STAGE, tasks[1])
    source = mine.read(folder / "cache.py")
    assert [task for task in tasks if mine.is_open(source, STAGE, task)] == [tasks[1]]
    assert source.endswith("# mine\n") and "# mine" in mine.read(kept / "cache.py")
    assert sorted(path.name for path in folder.iterdir()) == mine.files(STAGE)


def test_results_are_kept_until_the_copy_changes(home):
    folder = mine.start(STAGE)
    assert mine.recorded(STAGE) == {}
    mine.record(STAGE, {1: True})
    mine.record(STAGE, {2: False})
    assert mine.recorded(STAGE) == {1: True, 2: False}
    mine.write(folder / "cache.py", mine.read(folder / "cache.py") + "\n")
    assert mine.recorded(STAGE) == {}
    for junk in ("", "[]", '{"stage02_kv_cache": 3}', "\xff"):
        (home / "tested.json").write_bytes(junk.encode("latin-1"))
        assert mine.recorded(STAGE) == {}
    mine.record(STAGE, {1: True})
    assert mine.recorded(STAGE) == {1: True}


DEMO = '''\
class Base:
    def name(self):
        return "reference"

class Thing(Base):
    @property
    def size(self):
        """How large."""
        return "reference size"
    @staticmethod
    def free(x):
        return f"reference {x}"
    @classmethod
    def made(cls, x=1):
        return f"reference {cls.__name__} {x}"
    def name(self):
        return super().name() + "!"
    def count(self):
        for number in range(3):
            yield number
    def other(self):
        return helper() + ", the other task"

def helper():
    return "reference help"

def twice(function):
    return lambda *arguments: function(*arguments) * 2

@twice
def decorated(x):
    return f"reference {x} "

TABLE = {"decorated": decorated}
'''
CALLS: dict[str, Callable[[Any], Any]] = {
    "Thing.size": lambda work: work.Thing().size,
    "Thing.free": lambda work: work.Thing.free(5),
    "Thing.made": lambda work: work.Thing.made(x=2),
    "Thing.name": lambda work: work.Thing().name(),
    "Thing.count": lambda work: list(work.Thing().count()),
    "decorated": lambda work: work.TABLE["decorated"](5),
}
TASKS = f"""\
from shared.task import Task
TASKS = (
    Task(1, "work.py", {tuple(CALLS)!r}, "all kinds", "text", 1, ("hint",), ("tests/test_w.py",)),
    Task(2, "work.py", ("Thing.other",), "other", "text", 1, ("hint",), ("tests/test_other.py",)),
)
"""
DEMO_STAGE = "stage98_demo"


def forget() -> None:
    """Remove the overlay, and all modules that were loaded under it."""
    mine.ACTIVE.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == DEMO_STAGE]:
        del sys.modules[name]


@pytest.fixture
def demo(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with one small stage, which is started; the folder of its copy."""
    package = tmp_path / "project" / DEMO_STAGE
    package.mkdir(parents=True)
    user, plain = "from .work import decorated\n", "whose = 'reference'\n"
    sources = {"__init__": "", "work": DEMO, "tasks": TASKS, "user": user, "plain": plain}
    for name, source in sources.items():
        mine.write(package / f"{name}.py", source)
    monkeypatch.setattr(paths, "ROOT", tmp_path / "project")
    monkeypatch.syspath_prepend(tmp_path / "project")
    monkeypatch.setattr(mine, "ACTIVE", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield mine.start(DEMO_STAGE)
    forget()


def load(name: str) -> Any:
    return importlib.import_module(f"{DEMO_STAGE}.{name}")


def laid(folder: Path, source: str, **options: Any) -> tuple[mine.Overlay, Any]:
    """Lay this work.py over the reference's: the overlay and the module."""
    forget()
    mine.write(folder / "work.py", source)
    return mine.overlay(DEMO_STAGE, **options), load("work")


@pytest.mark.parametrize("function", CALLS)
def test_an_open_task_speaks_only_where_it_is_judged(demo, function):
    expected = CALLS[function](load("work"))
    active, work = laid(demo, mine.read(demo / "work.py"))
    assert work.__file__ == str(demo / "work.py")
    assert CALLS[function](work) == expected
    active.judged.add(2)
    assert CALLS[function](work) == expected
    active.judged.add(1)
    error = "^stage98 task 1: all kinds; python -m shared.course.exercise hint stage98 1$"
    pytest.raises(NotImplementedError, CALLS[function], work).match(error)
    with pytest.raises(NotImplementedError):  # imported by name, it is overlaid too
        load("user").decorated(5)
    active.judged.clear()
    assert CALLS[function](work) == expected


def test_what_is_written_runs_everywhere_and_reference_bodies_meet_it(demo):
    """Two edits of the same length within a second: no compiled file may hide the second."""
    own = mine.read(demo / "work.py").replace("reference help", "my help")
    for whose in ("yours", "mines"):
        _, work = laid(demo, DEMO.replace("reference", whose))
        assert work.decorated(1) == f"{whose} 1 {whose} 1 " and work.Thing().size == f"{whose} size"
        assert inspect.getsourcefile(inspect.unwrap(work.Thing.other)) == str(demo / "work.py")
    _, work = laid(demo, own)
    assert work.Thing().other() == "my help, the other task"
    assert not (demo / "__pycache__").exists()


def test_a_task_with_one_open_or_missing_function_is_open_as_a_whole(demo):
    """Half of a task beside half of the reference could contradict each other."""
    size = Task(1, "", ("Thing.size",), "all kinds", "", 1, (), ())
    half = mine.emptied(DEMO.replace("reference", "mine"), DEMO_STAGE, size)
    fresh = mine.read(demo / "work.py")
    for source in (half, fresh[: fresh.index("@twice")]):
        active, work = laid(demo, source)
        assert work.decorated(1) == "reference 1 reference 1 "
        active.judged.add(1)
        if source == half:
            assert work.decorated(1) == "mine 1 mine 1 "
    with pytest.raises(NotImplementedError, match="stage98 task 1: .*work.py has no decorated"):
        work.decorated(1)


def test_a_design_of_ones_own_needs_no_private_function_of_the_reference():
    source = "class A:\n    def run(self):\n        return 1\n"
    for functions, is_open in ((("A.run", "A._help"), False), (("A.run", "A.help"), True)):
        task = Task(1, "a.py", functions, "", "", 1, (), ())
        assert mine.is_open(source, STAGE, task) == is_open


def test_a_task_alone_is_the_students_and_all_others_are_the_references(demo):
    source = DEMO.replace("reference", "mine").replace("the other task", "my other task")
    mine.write(demo / "plain.py", "whose = 'mine'\n")
    _, work = laid(demo, source, files=["work.py"], only=frozenset([2]))
    assert work.decorated(1) == "reference 1 reference 1 " and work.Thing().size == "reference size"
    assert work.Thing().other() == "mine help, my other task"
    assert load("plain").whose == "reference" and work.__file__ == str(demo / "work.py")


def test_any_module_may_be_in_a_copy_but_not_the_package_and_its_tasks(demo):
    for name in ("plain", "tasks", "__init__", "conftest"):
        mine.write(demo / f"{name}.py", "whose = 'mine'\n")
    assert mine.overlay(DEMO_STAGE).files == ("plain.py", "work.py")
    assert load("plain").whose == "mine" and load("tasks").TASKS


def test_an_overlay_that_comes_too_late_is_an_error(demo):
    load("work")
    pytest.raises(RuntimeError, mine.overlay, DEMO_STAGE).match("work.py")
    sys.modules.pop(f"{DEMO_STAGE}.work")
    mine.overlay(DEMO_STAGE)
    pytest.raises(RuntimeError, mine.overlay, DEMO_STAGE).match("another overlay")
