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
from unittest.mock import patch

import numpy as np

from . import launch as launching


@dataclass
class Counts:
    """Of one kernel: launches, programs, bytes, and operations of products (a multiply and an add
    are two). addresses: of each load, in order."""

    launches: int = 0
    programs: int = 0
    loaded: int = 0
    stored: int = 0
    operations: int = 0
    addresses: list[Any] = field(default_factory=list)


@contextmanager
def counting() -> Iterator[dict[str, Counts]]:
    """Counts by the kernel's name of all that is launched inside."""
    from triton.runtime.interpreter import interpreter_builder as builder

    counts: dict[str, Counts] = defaultdict(Counts)
    load, store = builder.create_masked_load, builder.create_masked_store
    product, run, current = builder.create_dot, launching.run, Counts()

    def masked_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        current.loaded += len(addresses) * pointers.get_element_ty().primitive_bitwidth // 8
        current.addresses.append(addresses)
        return load(pointers, mask, *rest)

    def masked_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count = int(np.sum(np.broadcast_to(mask.data, pointers.data.shape)))
        current.stored += count * pointers.get_element_ty().primitive_bitwidth // 8
        return store(pointers, value, mask, *rest)

    def dot(a: Any, b: Any, *rest: Any) -> Any:
        current.operations += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return product(a, b, *rest)

    def watch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        nonlocal current
        current = counts[kernel.__name__]
        current.launches += 1
        current.programs += int(np.prod(grid))
        run(kernel, grid, *arguments, **constants)

    # Loads and stores without a mask are made of those with one.
    replaced: dict[str, Any] = {"create_masked_load": masked_load, "create_dot": dot}
    replaced["create_masked_store"] = masked_store
    with patch.multiple(builder, **replaced), patch.object(launching, "run", watch):
        yield counts
