"""Stage 03: several sequences in one step, as a rectangle: short prompts are padded on the left.

`cache.py` is what this stage teaches: a cache of rows, and a mask and positions that undo the
padding. `engine.py` is stage 02's engine for a whole batch, which ends when its last row ends.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "The weights are read for one row: why not for many?"
FIRST_FILE: str = "cache.py"
