"""Stage 09: our own kernels, in C, which read keys and values in place.

`attention.c` is attention over blocks; `library.py` compiles it at first use and loads it;
`cache.py` is stage 05's cache in the layout that the kernel reads.
"""

from shared import openmp

QUESTION: str = "What is left on the table when every operator comes from a library?"
FIRST_FILE: str = "attention.c"

openmp.choose()  # before PyTorch is loaded
