"""What of the project a submission sees: nothing that computes what its task asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared import chat_template, paths
from shared.course import judge, mine
from shared.course.judge import Judge
from stage11_speculative import grammar

from .test_judge import FILE, REFERENCE, STAGE, TASK, WITH_TASKS, contained, entries

TWINS = entries("twins.txt")


@contained
def test_the_tree_has_no_reference_of_the_task():
    with Judge(seeds=[3]) as made, made._tree(made._base(STAGE), {}) as tree:
        judge.empty_out(tree, STAGE, TASK)
        body = "rows += range(len(ids) - work.rows, len(ids))"
        assert body in REFERENCE
        texts = [path.read_bytes() for path in tree.rglob("*") if path.is_file()]
        assert not [text for text in texts if body.encode() in text]
        sources = {path.name for path in tree.rglob("*.py")} - {*judge.SOURCES}
        assert sources == {FILE} and not (tree / STAGE / "plan.pyc").exists()


@contained
@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_a_call_of_what_computes_the_same_gets_nothing(name):
    """One function of a task, beside the reference's others."""
    stage, number, function = name.split(" ")
    task = mine.find_task(stage, int(number))
    source = mine.read(paths.ROOT / stage / task.file)
    alone, body = replace(task, functions=(function,)), TWINS[name].strip("\n").split("\n")
    with Judge(seeds=[3, 4]) as made:
        why = made.why(stage, task, mine.emptied(source, stage, alone, body).encode())
    assert "NotImplementedError" in why


@pytest.mark.parametrize("stage", WITH_TASKS)
def test_twins_are_functions_of_other_files(stage):
    for task in mine.tasks(stage):
        for name, functions in judge.twins_of(stage, task).items():
            assert name != f"{stage}/{task.file}"
            twin = replace(task, functions=functions)
            assert mine.emptied(mine.read(paths.ROOT / name), stage, twin)


def test_programs_that_modules_start_keep_their_source():
    """They are started by the names of their files."""
    with Judge(confined=False, seeds=[3]) as made:
        base = made._base("stage11_speculative")
        for program in (grammar.TRIAL, chat_template.RENDERER):
            assert (base / program.relative_to(paths.ROOT)).is_file()
