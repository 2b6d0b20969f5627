"""Tasks and edits, as they stand and as they are read. `prove` shows that they do what they say."""

from __future__ import annotations

import ast
import re

import pytest

from exercises import edits, prove, splice, tasks
from shared import paths
from shared.errors import UserError

STAGES = tasks.stages()
everywhere = pytest.mark.parametrize("stage", STAGES)


@everywhere
def test_functions_and_tests_of_tasks_exist_and_edits_fit(stage):
    known = tasks.read(stage)
    assert sum(task.points for task in known) == 100
    for task in known:
        source = tasks.source(task.file)
        for function in task.functions:
            assert splice.segment(source, function), f"{task.name}: {function}"
    written = {
        path: path.read_text(encoding="utf-8")
        for path in paths.ROOT.glob("stage*/tests/**/*.py")  # a contract's tests are elsewhere
    }
    named = {test for task in known for test in task.tests}
    for test in named | {test for edit in edits.read(stage) for test in edit.tests}:
        file, *_, name = test.split("::")
        assert (paths.ROOT / file).is_file(), test
        assert any(re.search(rf"def {name}\b", text) for text in written.values()), test
    assert [problem for problem in prove.jobs(stage) if isinstance(problem, str)] == []


@everywhere
def test_a_task_has_edits_and_hints_and_its_tests_pin_no_words_of_its_errors(stage):
    raised: set[str] = set()
    for task in tasks.read(stage):
        assert task.hints and task.text
        tree = splice.parse(tasks.source(task.file))
        functions = [splice.find(tree, name) for name in task.functions]
        for node in (inner for f in functions if f for inner in ast.walk(f)):
            if isinstance(node, ast.Raise) and node.exc:
                raised |= {*re.findall(r"[a-z]{4,}(?: [a-z]+)+", ast.unparse(node.exc))}
    for path in (paths.ROOT / stage / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for words in re.findall(r'match=f?r?"([^"]+)"', text):
            pinned = [said for said in raised if words in said or said in words]
            assert not pinned, f"{path.name}: match={words!r} pins an error of a task"


def test_edits_are_read(project):
    planted, right = edits.read("stage01_toy")
    assert (planted.task, planted.kind) == (2, "museum")
    assert (
        planted.fields["title"] == "a row is too long" and planted.fields[">"] == "It was long ago."
    )
    assert planted.fields["shows"].count("\n") == 1 and planted.tests == (
        "stage01_toy/tests/test_toy.py::test_rows",
    )
    source = tasks.source("stage01_toy/toy.py")
    assert "[0] * (count + 1)" in planted.applied(source)
    with pytest.raises(LookupError):
        planted.applied(source.replace("* count", "* n"))
    assert "while len(made)" in right.applied(source, tasks.find("stage01_toy", 2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("## a.py task 1\nx\n- a\n+ b", "a header is"),
        ("## a.py   task 1\n- a\n+ b\ncaught by: t", "one line that names it"),
        ("## a.py   task 1\nx\n- a\ncaught by: t", r"a \+ for each -"),
        ("## a.py\nx\n- a\n+ b", "have 'caught by:'"),
        ("## a.py   museum\nx\n- a\n+ b\ncaught by: t\ntitle: t", "needs >, hint, seen, shows"),
    ],
)
def test_an_edit_that_is_wrong_is_named_by_its_line(text, words):
    with pytest.raises(UserError, match=f"stage01.txt, line 1: .*{words}"):
        list(edits.parse(text, "stage01_forward"))


@pytest.mark.parametrize("head", ["points = 1", "points ="])
def test_a_task_that_is_wrong_is_named(head):
    with pytest.raises(UserError, match="task 3: .*points, file"):
        list(tasks.parse(f"## Task 3: it\n\n```toml\n{head}\n```\n", "stage01_forward"))
