"""The first difference between two results of a driver, in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 4e-2, "float16": 4e-3}
NUMBERS = 2e-5  # of single numbers, which may come from float32


def difference(expected: Any, result: Any, call: str = "", path: str = "") -> str:
    """The first difference between two results, in one line with its call; "" if there is none.
    Numbers may differ by the tolerance of their dtype."""

    def differs(right: Any, wrong: Any, place: str = path) -> str:
        return f"{call + ': ' if call else ''}{place} is {_short(wrong)}, not {_short(right)}"

    if isinstance(expected, dict) and isinstance(result, dict):
        call = str(expected.get("call", call))
        if expected.keys() == {"dtype", "shape", "values"} == result.keys():
            return _tensors(expected, result, differs)
        for key in expected.keys() | result.keys():
            if key not in result or key not in expected:
                return differs(sorted(expected), sorted(result), f"what {path or 'it'} has")
        for key, right in expected.items():
            if key == "call":  # it is for the reader
                continue
            inner = f"{path}.{key}" if path else key
            if why := difference(right, result[key], call, inner):
                return why
        return ""
    if isinstance(expected, list) and isinstance(result, list):
        for index, (right, wrong) in enumerate(zip(expected, result, strict=False)):
            if why := difference(right, wrong, call, f"{path}[{index}]"):
                return why
        if len(expected) != len(result):
            return differs(len(expected), len(result), f"the length of {path or 'the result'}")
        return ""
    return "" if _equal(expected, result, NUMBERS) else differs(expected, result, path or "it")


def _tensors(expected: Any, result: Any, differs: Callable[..., str]) -> str:
    for key in ("dtype", "shape"):
        if expected[key] != result[key]:
            return differs(expected[key], result[key], f"the {key}")
    tolerance = TOLERANCE.get(expected["dtype"], 0.0)
    values = result["values"]
    if not isinstance(values, list) or len(values) != len(expected["values"]):
        return differs("a tensor", "not one")
    for index, (right, wrong) in enumerate(zip(expected["values"], values, strict=True)):
        if not _equal(right, wrong, tolerance):
            place = list[int]()
            for size in reversed(expected["shape"]):
                index, inner = divmod(index, size)
                place.insert(0, inner)
            return differs(right, wrong, f"element {place}")
    return ""


def _equal(right: Any, wrong: Any, tolerance: float) -> bool:
    if isinstance(right, float) and type(wrong) in (int, float):
        return abs(right - wrong) <= tolerance * (1 + abs(right))
    return type(right) is type(wrong) and right == wrong


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
