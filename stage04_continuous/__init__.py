"""Stage 04: continuous batching. The batch is formed anew before every forward pass.

`scheduler.py` is what this stage teaches: which requests run next, and how many tokens of each.
It turns requests (`request.py`) into a plan (`plan.py`). `runner.py` and `cache.py` carry the plan
out, with keys and values in slots. `engine.py` is the step: schedule, move, run, sample,
postprocess.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION: str = "Requests come and go at any time: why should the batch wait for its last row?"
FIRST_FILE: str = "scheduler.py"
