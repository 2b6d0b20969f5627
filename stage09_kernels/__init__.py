"""Stage 09: our own kernels, in C, which read keys and values in place.

`naive.c` has all of them, one number at a time, and `fast/` the same functions made fast;
`library.py` compiles them at first use and loads them; `cache.py` is stage 05's cache in the layout
that they read.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "What is left on the table when every operator comes from a library?"
FIRST_FILE: str = "naive.c"
