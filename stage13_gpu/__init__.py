"""Stage 13: the same seams on a GPU, in Triton.

`naive.py` has the arithmetic of the kernels in PyTorch, `flash.py`, `fused.py` and
`quantized.py` the kernels, `cache.py` and `runner.py` what the engine of stage 05 runs on, and
`graphs.py` the step as one launch. Without a GPU, the kernels run in Triton's interpreter, which is
how they are proved.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "What does a GPU change, when the arithmetic stays the same?"
FIRST_FILE: str = "naive.py"
