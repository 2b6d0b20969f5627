"""Stage 09: our own kernels, in C, which read keys and values in place.

`naive.c` has all of them, one number at a time, and `fast/` the same functions made fast;
`library.py` compiles them at first use and loads them; `cache.py` is stage 05's cache in the layout
that they read.
"""

from importlib import import_module
from typing import Any

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "What is left on the table when every operator comes from a library?"
FIRST_FILE: str = "naive.c"


def __getattr__(name: str) -> Any:  # PyTorch takes seconds to import: only for those who ask
    if name in ("LLM", "SamplingParams"):
        return getattr(import_module(f"{__name__}.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
