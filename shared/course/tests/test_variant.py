"""Variants of stage 05: a solution of each rule passes, and the reference's rules fail."""

from __future__ import annotations

import ast
import sys
from itertools import product
from types import ModuleType
from typing import Any

import pytest

from shared import paths
from shared.course import exercise, grading, mine, variant
from shared.errors import UserError

# A solution of each rule: what to put into the classes of variant.SOURCE.
POOL = """
        self.shares = [0] * count

    def publish(self, block: int, digest: bytes) -> None:
        if self.digests[block] is None and digest not in self.by_digest:
            self.shares[block] = 0
        super().publish(block, digest)

    def share(self, block: int) -> None:
        super().share(block)
        self.shares[block] += 1

    def take(self) -> int:
        if self.cached and not self.free:
            self.cached.move_to_end({}, last=False)
        return super().take()
"""
VICTIMS = (
    "next(block for block in self.by_digest.values() if block in self.cached)",
    "min(self.cached, key=lambda block: self.shares[block])",
    "list(self.cached)[-1]",
)
SCHEDULER = """
        watermark = options.get("watermark", 1 / {})
        self.watermark = int(watermark * pool.count + {})

    def _rank(self, request: Request) -> Any:
        priority, arrival = super()._rank(request)
        return priority, {}, arrival
"""
ROUNDED = {"up": "0.999", "down": "0"}
RANKS = (
    "len(self.tables[request].blocks)",
    "-request.computed",
    "request.sampling.max_tokens - len(request.output.token_ids)",
)


def solution(given: variant.Variant) -> str:
    """variant.py as a student hands it in."""
    victim = dict(zip(variant.EVICTIONS, VICTIMS, strict=True))[given.eviction]
    rank = dict(zip(variant.TIES, RANKS, strict=True))[given.tie]
    before, first, second = (
        "super().__init__(count, block_size)\n",
        "size: int = 16",
        "**options)\n",
    )
    source = variant.SOURCE.replace(first, f"size: int = {given.size}")
    source = source.replace(before, before + POOL.format(victim))
    rules = variant.SHARES[given.share], ROUNDED[given.rounding], rank
    return source.replace(f"(pool, {second}", f"(pool, {second}{SCHEDULER.format(*rules)}")


def failed(given: variant.Variant, source: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the variant's tests that fail with this variant.py."""
    student, judge = ModuleType("variant"), dict[str, Any]()
    exec(source, vars(student))
    monkeypatch.setitem(sys.modules, "variant", student)
    exec(given.tests(), judge)
    names = {name for name in judge if name.startswith("test_")}
    assert names == {"test_eviction", "test_block_size", "test_watermark", "test_preemption"}
    wrong = set()
    for name in names:
        try:
            judge[name]()
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
    right = solution(given)
    assert failed(given, right, monkeypatch) == set()
    assert len(failed(given, variant.SOURCE, monkeypatch)) == 4  # the reference's rules
    tests = {"eviction": "eviction", "size": "block_size", "share": "watermark"}
    tests |= {"rounding": "watermark", "tie": "preemption"}
    # Another variant's rule fails its test, and no other one.
    for other, (rule, test) in product(enough(), tests.items()):
        if rules(other)[rule] != rules(given)[rule]:
            mixed = variant.Variant("", 0, **{**rules(given), rule: rules(other)[rule]})
            assert failed(given, solution(mixed), monkeypatch) == {f"test_{test}"}


def test_a_seed_gives_the_same_bytes_and_another_seed_other_tests():
    first, again, other = (variant.of(variant.seed(text)) for text in ("Ada17", " ada17", "bob3"))
    assert first == again and (first.text(), first.tests()) == (again.text(), again.tests())
    assert first.tests() != other.tests() and first.text() != other.text()
    assert len({tuple(rules(variant.of(str(number))).values()) for number in range(99)}) > 50
    for given in map(variant.of, map(str, range(20))):
        ast.parse(given.tests())
        assert "$" not in given.text() + given.tests()


def test_start_writes_the_rules_and_grade_judges_them(home, tmp_path, capsys, monkeypatch):
    """Takes seconds: the right solution is judged in a process of its own."""
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

    judge = grading._judge
    monkeypatch.setattr(mine, "tasks", lambda stage, tasks=mine.tasks: tasks(stage)[:1])
    monkeypatch.setattr(
        grading, "_judge", lambda *given: judge(*given) if given[-1] is not None else "not judged"
    )
    mine.write(folder / "test_variant.py", "")  # the submission's tests do not matter
    for source, points in (("import os\n", " 0"), (solution(given), "20")):
        mine.write(folder / variant.FILE, source)
        exercise.main(["grade", "stage05", "--variant", "ada17", "--out", str(tmp_path / "a.json")])
        out = capsys.readouterr().out
        assert f" {points} of  20  stage05 task 2: the rules of variant ada17" in out, out
    assert not (paths.ROOT / variant.STAGE / "tests" / "test_variant.py").exists()
