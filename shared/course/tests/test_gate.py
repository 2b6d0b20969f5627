"""The gate: what is unusual in a submission is remarked on, and no solution is."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import paths
from shared.course import gate, mine, wrong

WITH_TASKS = list(filter(mine.tasks, paths.discover()))
PLACES = [("stage02_kv_cache", "cache.py"), ("stage06_serving", "protocol.py")]


@pytest.mark.parametrize("stage", WITH_TASKS)
def test_the_reference_and_wrong_solutions_pass_the_gate(stage):
    for file in mine.files(stage):
        reference = mine.read(paths.ROOT / stage / file)
        assert gate.remark(reference.encode(), stage, file) == ""
        own = [each for each in wrong.read(stage) if each.task.file == file]
        source = wrong.applied(reference, stage, own[0])
        assert gate.remark(source.encode(), stage, file) == ""


HONEST = """
import math
from functools import lru_cache, wraps

@lru_cache
def helper(x, *, y=1):
    "A docstring with __dunders__ in it."
    found = {x: [getattr(y, "real", None)]}
    total = sum(value for values in found.values() for value in values)
    return type(x) is int and math.isclose(total, y), f"{x!r:>10}".strip()

class Note:
    def __init__(self, text):
        super().__init__()
        self.text, self.seen_before = text, {}

    @property
    def lines(self):
        return self.text.splitlines()

try:
    note = copy_of = [*Note("a").lines[0]]
except (ValueError, IndexError) as error:
    raise RuntimeError(str(error)) from None
"""

# A program a line, with \n for its own line ends; the last ones use names of stage02's cache.py.
HOSTILE, TORCH = mine.read(Path(__file__).with_name("hostile.txt")).split("\n\n")


def remark(code: str, stage: str, file: str) -> str:
    source = mine.read(paths.ROOT / stage / file) + "\n" + code.replace(r"\n", "\n") + "\n"
    return gate.remark(source.encode(), stage, file)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0])
def test_what_is_unusual_is_remarked_on_and_plain_python_is_not(place):
    code = HOSTILE.splitlines() + (TORCH.splitlines() if place == PLACES[0] else [])
    assert len(code) > 35 and [line for line in code if not remark(line, *place)] == []
    deep = remark("x = " + "a." * 5000 + "b", *place)
    assert deep == "" or "nested" in deep
    sentence = remark("\nimport sys", *place)
    assert "the import of sys" in sentence and sentence.startswith(f"{place[1]}, line ")
    assert "longer than 64 KiB" in remark("#" * gate.LONGEST, *place)
    assert remark(HONEST, *place) == ""
    assert remark("def (:", *place) == "" == gate.remark(b"\xff", *place)
