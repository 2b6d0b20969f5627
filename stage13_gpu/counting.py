"""What kernels read, write and multiply, counted while Triton's interpreter runs them.

The interpreter hands each `tl.load` all addresses and a mask: those that it lets through are the
bytes that a GPU would ask its memory for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import launch as launching
from .launch import _run


@dataclass
class Counts:
    """Of one kernel: launches, programs, bytes, and operations of products (a multiply and an add
    are two). addresses: of each load, in order, if they are kept."""

    launches: int = 0
    programs: int = 0
    loaded: int = 0
    stored: int = 0
    operations: int = 0
    addresses: list[Any] = field(default_factory=list)


@contextmanager
def counting(keep: bool = False) -> Iterator[dict[str, Counts]]:
    """Counts by the kernel's name of all that is launched inside. keep: the addresses as well."""
    from triton.runtime.interpreter import interpreter_builder as builder

    counts: dict[str, Counts] = defaultdict(Counts)
    names = ["create_load", "create_masked_load", "create_store", "create_masked_store"]
    originals = {name: getattr(builder, name) for name in [*names, "create_dot"]}
    current = Counts()

    def size(pointers: Any, mask: Any) -> int:
        count = int(np.sum(np.broadcast_to(mask.data, pointers.data.shape)))
        return count * pointers.get_element_ty().primitive_bitwidth // 8

    def masked_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        current.loaded += size(pointers, mask)
        if keep:
            current.addresses.append(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
        return originals["create_masked_load"](pointers, mask, *rest)

    def masked_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        current.stored += size(pointers, mask)
        return originals["create_masked_store"](pointers, value, mask, *rest)

    def dot(a: Any, b: Any, *rest: Any) -> Any:
        current.operations += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return originals["create_dot"](a, b, *rest)

    def watch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        nonlocal current
        current = counts[kernel.__name__]
        current.launches += 1
        current.programs += int(np.prod(grid))
        _run(kernel, grid, *arguments, **constants)

    # Loads and stores without a mask are made of those with one.
    replaced = {"create_masked_load": masked_load, "create_masked_store": masked_store}
    for name, function in (replaced | {"create_dot": dot}).items():
        setattr(builder, name, function)
    launching.WATCHERS.append(watch)
    try:
        yield counts
    finally:
        launching.WATCHERS.pop()
        for name, original in originals.items():
            setattr(builder, name, original)
