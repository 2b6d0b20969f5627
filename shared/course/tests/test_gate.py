"""The gate of grading: what could reach the judge is refused, and no solution is."""

from __future__ import annotations

import pytest

from shared import paths
from shared.course import gate, mine, wrong

WITH_TASKS = list(filter(mine.tasks, paths.discover()))
PLACES = [("stage02_kv_cache", "cache.py"), ("stage06_serving", "protocol.py")]


@pytest.mark.parametrize("stage", WITH_TASKS)
def test_the_reference_and_wrong_solutions_pass_the_gate(stage):
    for file in mine.files(stage):
        reference = mine.read(paths.ROOT / stage / file)
        assert gate.refused(reference.encode(), stage, file) == ""
        own = [each for each in wrong.read(stage) if each.task.file == file]
        source = wrong.applied(reference, stage, own[0])
        assert gate.refused(source.encode(), stage, file) == ""


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
HOSTILE = r"""
import _pytest.reports
import sys
import pytest
import os, math
import unittest.mock as m
import torch.utils.cpp_extension
from shared.course import grading
from shared import paths
from .engine import Engine
from importlib import import_module
from functools import update_wrapper
from operator import attrgetter
from math import *
import math; math.sqrt = max
import statistics; statistics.sys.modules
import re; re.enum.sys
from contextlib import sys
from statistics import __dict__
__import__('pytest')
exec('import pytest')
eval('1')
open('x', 'w')
globals()['x'] = 1
x = __builtins__
x = (lambda: 0).__globals__
x = ().__class__.__base__.__subclasses__()
x = getattr(1, '__class__')
x = getattr(1, 're' + 'al')
get = getattr
f = type; f('L', (list,), {})
type('L', (list,), {'__eq__': max})
setattr(int, 'x', 1)
def g(): yield; g().gi_frame.f_back
try: pass\nexcept Exception as error: error.__traceback__.tb_frame
class Equal(list):\n    pass
class Equal:\n    def __eq__(self, other): return True
class Equal:\n    __eq__ = max
class Equal:\n    def __bool__(self): return True
class Equal(metaclass=max): pass
int.real = 1
def h(T): T.equal = max
from functools import wraps; wraps(max, assigned=('x',))
"""
TORCH = """
torch.equal = max
torch.Tensor.allclose = max
torch.sys.modules['_pytest']
torch.serialization.os.system('true')
torch.load('x')
t = torch
t = [torch]
F.torch.sys
torch.hub.load('x', 'y')
torch.jit.script
class Lie(Tensor): pass
Config.kv_bytes_per_token = max
"""


def refused(code: str, stage: str, file: str) -> str:
    source = mine.read(paths.ROOT / stage / file) + "\n" + code.replace(r"\n", "\n") + "\n"
    return gate.refused(source.encode(), stage, file)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0])
def test_what_could_reach_the_judge_is_refused_and_plain_python_is_not(place):
    code = HOSTILE.strip() + ("" if place != PLACES[0] else "\n" + TORCH.strip())
    assert [line for line in code.split("\n") if not refused(line, *place)] == []
    deep = refused("x = " + "a." * 5000 + "b", *place)
    assert deep == "" or "nested" in deep
    sentence = refused("\nimport sys", *place)
    assert "the import of sys" in sentence and sentence.startswith(f"{place[1]}, line ")
    assert refused(HONEST, *place) == ""
    assert refused("def (:", *place) == "" == gate.refused(b"\xff", *place)
