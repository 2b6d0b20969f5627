"""Variants of stage 05: a solution of each rule passes, and the reference's rules fail."""

from __future__ import annotations

import ast
import contextlib
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shared.course import exercise, grading, judge, mine, variant
from shared.errors import UserError


def failed(given: variant.Variant, source: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the variant's tests that fail with this variant.py."""
    student, tests = ModuleType("variant"), dict[str, Any]()
    exec(source, vars(student))
    monkeypatch.setitem(sys.modules, "variant", student)
    exec(given.tests(), tests)
    names = {name for name in tests if name.startswith("test_")}
    assert names == {"test_eviction", "test_block_size", "test_watermark", "test_preemption"}
    wrong = set()
    for name in names:
        try:
            tests[name]()
        except AssertionError:
            wrong.add(name)
    return wrong


def rules(given: variant.Variant) -> dict[str, Any]:
    return {name: value for name, value in vars(given).items() if name not in ("name", "number")}


def enough() -> list[variant.Variant]:
    """Variants of as few seeds as cover every rule."""
    chosen, seen = [], set[Any]()
    for number in range(100):
        found = set(rules(given := variant.of(str(number))).items())
        if not found <= seen:
            chosen.append(given)
            seen |= found
    tables = (variant.EVICTIONS, variant.SIZES, variant.SHARES, variant.ROUNDINGS, variant.TIES)
    assert len(seen) == sum(map(len, tables)) and len(chosen) >= 3
    return chosen


@pytest.mark.parametrize("given", enough(), ids=lambda given: given.name)
def test_each_rule_is_judged_by_its_own_test(given, monkeypatch):
    right = given.solution()
    assert failed(given, right, monkeypatch) == set()
    assert len(failed(given, variant.SOURCE, monkeypatch)) == 4  # the reference's rules
    tests = {"eviction": "eviction", "size": "block_size", "share": "watermark"}
    tests |= {"rounding": "watermark", "tie": "preemption"}
    # Another variant's rule fails its test, and no other one.
    for other, (rule, test) in product(enough(), tests.items()):
        if rules(other)[rule] != rules(given)[rule]:
            mixed = variant.Variant("", 0, **{**rules(given), rule: rules(other)[rule]})
            assert failed(given, mixed.solution(), monkeypatch) == {f"test_{test}"}


def test_a_seed_gives_the_same_bytes_and_another_seed_other_tests():
    first, again, other = (variant.of(variant.seed(text)) for text in ("Ada17", " ada17", "bob3"))
    assert first == again and (first.text(), first.tests()) == (again.text(), again.tests())
    assert first.tests() != other.tests() and first.text() != other.text()
    assert len({tuple(rules(variant.of(str(number))).values()) for number in range(99)}) > 50
    for given in map(variant.of, map(str, range(20))):
        ast.parse(given.tests())
        assert "$" not in given.text() + given.tests()


def test_start_writes_the_rules_and_grade_judges_them(home, tmp_path, capsys, monkeypatch):
    """Takes seconds: solutions are judged in processes of their own."""
    exercise.main(["start", "stage05", "--variant", "ada17"])
    given, folder = variant.of("ada17"), mine.folder(variant.STAGE) / variant.FOLDER
    assert f"{folder / 'VARIANT.md'} has the rules" in capsys.readouterr().out
    assert mine.read(folder / "test_variant.py") == given.tests()
    assert given.eviction in mine.read(folder / "VARIANT.md")
    for words in (["start", "stage05"], ["start", "stage04"], ["grade", "stage04"]):
        with pytest.raises(UserError, match="a variant in|--variant is for stage05"):
            exercise.main([*words, "--variant", "bob3"])
    with pytest.raises(UserError, match="not a seed"):
        exercise.main(["grade", "stage05", "--variant", "a/b"])

    if why := judge.unconfined():
        pytest.skip(why)
    monkeypatch.setattr(grading, "file_of", given_file)
    words = ["grade", "stage05", "--variant", "ada17", "--out", str(tmp_path / "a.json")]
    with judge.Judge(seeds=[1, 2, 3]) as made:  # one for both: it runs the reference once
        monkeypatch.setattr(exercise, "_judge", lambda _: contextlib.nullcontext(made))
        for source, points in ((variant.SOURCE, " 0"), (given.solution(), "20")):
            mine.write(folder / variant.FILE, source)
            exercise.main(words)
            out = capsys.readouterr().out
            assert f" {points} of  20  stage05 task 7: the rules of variant ada17" in out, out


def given_file(folder: Path | None, name: str) -> tuple[bytes, str]:
    """Only the variant's file."""
    if folder is None or name != f"{variant.FOLDER}/{variant.FILE}":
        return b"", "not judged"
    return (folder / name).read_bytes(), ""
