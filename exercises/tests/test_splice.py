"""What is taken out of a hand-in, what is left behind, and what is refused."""

from __future__ import annotations

import pytest

from exercises import splice
from exercises.inside import difference

REFERENCE = '''
import math
class Sums:
    @staticmethod
    def add(x, y: int = 1):
        """Adds."""
        return x + y
    def _inner(self):
        return 1
def other():
    return math.pi
'''


def taken(submitted, *functions, others=()):
    return splice.splice("x.py", REFERENCE, submitted, functions or ("Sums.add",), others)


def run(source, call):
    namespace = {}
    exec(source, namespace)
    return eval(call, namespace)


def test_the_body_is_taken_under_the_references_signature_with_its_helpers():
    submitted = """
from functools import reduce as fold, lru_cache
import os.path
LIMIT = base() if False else 10
class Wide(int):
    more = 5
@lru_cache
def base(): return Wide(LIMIT).more
class Sums:
    scale = 2
    def add(x, y):
        def nested(a, b): return a + b
        return fold(nested, [x, y]) * Sums.scale + Sums._twice() + base()
    @lru_cache
    def _twice(): return 100
    def _inner(self): return 7
def other(): return 3
"""
    source, notes = taken(submitted)
    assert run(source, "Sums.add(1)") == 109  # a default and a decorator of the reference
    assert run(source, "Sums()._inner()") == 1 and run(source, "other()") > 3
    lines = ("line 16: your change of Sums._inner", "line 17: your change of other")
    assert notes == [f"{line} is not taken" for line in lines]
    assert taken(submitted, others=("Sums._inner", "other"))[1] == []
    windows = submitted.replace("\n", "\r\n")
    for text in (windows, submitted.replace("    ", "\t"), "\ufeff" + submitted):
        assert run(taken(text)[0], "Sums.add(1)") == 109


REFUSED = {
    "def x(:": "line 1: not Python",
    "class Sums:\n    add = lambda x, y: x": "Sums.add is missing",
    "class Sums:\n    def add(x, z): return x": "line 2: the signature of Sums.add",
    "class Sums:\n    async def add(x, y): return x": "line 2: the signature of Sums.add",
    "x = " + "(" * 300 + ")" * 300: "not Python",
}


@pytest.mark.parametrize("submitted", REFUSED)
def test_what_cannot_be_taken_is_refused_with_a_reason(submitted):
    with pytest.raises(splice.Refused, match=REFUSED[submitted]):
        taken(submitted)


def test_a_missing_private_function_is_no_present():
    alone, _ = taken("class Sums:\n    def add(x, y): return 1\n", "Sums.add", "Sums._inner")
    with pytest.raises(NotImplementedError):
        run(alone, "Sums()._inner()")


def test_another_body_leaves_signature_and_docstring():
    text = splice.with_body("x.py", REFERENCE, "Sums.add", "raise KeyError\nreturn 2")
    assert text == REFERENCE.replace("return x + y", "raise KeyError\n        return 2")


C = """/* one(x) { */
#if REAL == 4
static inline int one(const int *x,
                      int y) {
    if (y) { return 1; }
    return x[0];
}
#endif
static int two(void) { return 2; }
"""


def test_the_body_of_a_function_in_c_is_taken():
    empty = splice.with_body("x.h", C, "one", "/* empty */")
    assert empty == C.replace("    if (y) { return 1; }\n    return x[0];", "    /* empty */")
    submitted = C.replace("x[0]", "*x").replace("return 2", "return 3").replace("\n", "\r\n")
    source, notes = splice.splice("x.h", C, submitted, ["one"], [])
    assert source == C.replace("x[0]", "*x") and notes == ["line 9: your change is not taken"]
    for text, why in ((C, "not done"), (C.replace(" one(", " other("), "one is missing")):
        with pytest.raises(splice.Refused, match=why):
            splice.splice("x.h", C, text, ["one"], [])


def test_the_first_difference():
    assert difference([[0, 0], [0, 6]], [[0, 0], [0, 0]]) == "[1][1] is 6, not 0"
    assert difference({"a": [1]}, {"a": [1, 2]}) == "['a'][1] is nothing, not 2"
    assert difference(1.5, 2.5) == "it is 1.5, not 2.5" and difference(1.0, 1) == ""
    assert difference(None, 0) == "it is None, not 0"
