"""Stage 02: keep the keys and values of the past, and run only the new token.

`cache.py` is what this stage teaches: the cache, and the attention of a step that writes into it
and reads from it. `engine.py` is stage 01's engine with that cache. The model, the sampler and
the form of a request are still stage 01's.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "The past does not change: why compute it again for every token?"
FIRST_FILE: str = "cache.py"
