"""Stage 02: keep the keys and values of the past, and run only the new token.

`cache.py` is what this stage teaches: the cache, and the attention of a step that writes into it
and reads from it. `engine.py` is the engine of stage 01 with that cache. Model, sampler and the
shape of a request are stage 01's.
"""

from shared import openmp

QUESTION: str = "The past does not change: why compute it again for every token?"
FIRST_FILE: str = "cache.py"

openmp.choose()  # before PyTorch is loaded
