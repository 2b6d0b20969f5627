"""Tasks and edits, as they stand and as they are read. `prove` shows that they do what they say."""

from __future__ import annotations

import ast
import re

import pytest

from exercises import grade, splice, student, tasks
from exercises.__main__ import main
from shared import paths
from shared.errors import UserError

everywhere = pytest.mark.parametrize("stage", paths.discover())


@everywhere
def test_functions_and_tests_of_tasks_exist_and_edits_fit(stage):
    known = tasks.read(stage)
    assert sum(task.points for task in known) == 100
    for task in known:
        assert task.emptied(source := tasks.source(task.file)) != source
    written = {
        path: path.read_text(encoding="utf-8")
        for path in paths.ROOT.glob("stage*/tests/**/*.py")  # a contract's tests are elsewhere
    }
    named = {test for task in known for test in task.tests}
    for test in named | {test for edit in tasks.edits(stage) for test in edit.tests}:
        file, *_, name = test.split("::")
        assert (paths.ROOT / file).is_file(), test
        assert any(re.search(rf"def {name}\b", text) for text in written.values()), test
    for _, file, source, *_ in grade.to_prove(stage):
        assert not file.endswith(".py") or splice.parse(source)


@everywhere
def test_each_task_has_a_wrong_design_and_each_entry_its_fields(stage):
    known = tasks.edits(stage)
    wrong = [edit for edit in known if edit.task and edit.kind != "right"]
    assert {edit.task.name for edit in wrong} == {task.name for task in tasks.read(stage)}
    assert len(wrong) >= 6 and all(edit.task.file == edit.file for edit in wrong)
    for edit in known:
        assert edit.tests, edit.what
        story = {"title", "shows", "hint", "seen", ">"} if edit.kind == "museum" else set()
        assert {*edit.fields} == story, edit.what


@everywhere
def test_a_task_has_hints_and_its_tests_pin_no_words_of_its_errors(stage):
    raised: set[str] = set()
    for task in tasks.read(stage):
        assert task.hints and task.text
        if not task.file.endswith(".py"):
            continue
        tree = splice.parse(tasks.source(task.file))
        functions = [splice.find(tree, name) for name in task.functions]
        for node in (inner for f in functions if f for inner in ast.walk(f)):
            if isinstance(node, ast.Raise) and node.exc:
                text = ast.unparse(node.exc)
                raised |= {text, *re.findall(r"[a-z]{4,}(?: [a-z]+)+", text)}
    for path in (paths.ROOT / stage / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for words in re.findall(r'match=f?r?"([^"]+)"', text):
            pinned = [said for said in raised if words in said or said in words]
            assert not pinned, f"{path.name}: match={words!r} pins an error of a task"


@pytest.mark.slow
@pytest.mark.parametrize("exhibit", tasks.exhibits(), ids=lambda exhibit: exhibit.file)
def test_what_an_exhibit_shows_runs_without_its_bug(exhibit):
    assert "[exit status" not in student.symptom("\n".join(exhibit.fields["shows"]))


def test_edits_are_read(project):
    planted, right = tasks.edits("stage01_toy")
    assert (planted.task.number, planted.kind) == ("2", "museum") and tasks.exhibits() == [planted]
    assert planted.fields["title"] == ["a row is too long"] and len(planted.fields["shows"]) == 2
    assert planted.tests == ["stage01_toy/tests/test_toy.py::test_rows"]
    source = tasks.source("stage01_toy/toy.py")
    assert "[0] * (count + 1)" in planted.applied(source)
    with pytest.raises(UserError, match="occurs 0 times"):
        planted.applied(source.replace("* count", "* n"))
    path = project / "exercises/edits/stage01.txt"
    path.write_text(path.read_text().replace("museum:", "exhibit:"))
    with pytest.raises(UserError, match="stage01.txt: no header .* 'task 2 exhibit: a row"):
        tasks.edits("stage01_toy")
    assert "while len(made)" in right.applied(source)


def test_proof_tells_good_from_bad(project, capsys):
    path, tests = project / "exercises/edits/stage01.txt", "caught by: test_toy.py::test_sums"
    path.write_text(f"{path.read_text()}## fault: none\n{tests}\n- [0] * count\n+ count * [0]\n")
    assert main(["prove", "1"]) == 1
    out = capsys.readouterr().out
    assert "toy.py: none: stage01_toy/tests/test_toy.py::test_sums: {'passed'}" in out
    assert "6 runs, 1 problems" in out
