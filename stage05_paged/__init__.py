"""Stage 05: the paged cache. Memory is taken a block at a time, shared, counted, and given back.

`blocks.py` is what this stage teaches: the pool, the tables, and how a block is found again.
`cache.py` holds the keys and values and reads them through the tables, `scheduler.py` assigns the
blocks and takes them away, and `sanitizer.py` checks after every step that none is lost. The engine
is stage 04's; `engine.py` combines it with these parts.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "The length of an answer is unknown: why reserve memory for the longest?"
FIRST_FILE: str = "blocks.py"
