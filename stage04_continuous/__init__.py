"""Stage 04: continuous batching. The batch is put together again before every forward pass.

`scheduler.py` is what this stage teaches: who runs next, and how many of its tokens. It makes a
plan (`plan.py`) about requests (`request.py`). `runner.py` and `cache.py` carry it out, with keys
and values in slots, and `engine.py` is the step: schedule, move, run, sample, postprocess.
"""

from shared import openmp

QUESTION: str = "Requests come and go at any time: why should the batch wait for its last row?"
FIRST_FILE: str = "scheduler.py"

openmp.choose()  # before PyTorch is loaded
