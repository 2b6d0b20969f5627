"""Stage 08: the Llama family, through the same seam.

`numpy_llama.py` has the forward pass on one page, `model.py` the same in PyTorch with attention as
an argument, `rope.py` the rotary positions, and `config.py` the readers of config.json. The
engines of stages 01 to 05, the server and the load test find all this in shared/registry.py, and
stay unchanged.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "What do today's models have that GPT-2 lacks, and what does it buy?"
FIRST_FILE: str = "numpy_llama.py"
