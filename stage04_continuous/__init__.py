"""Stage 04: continuous batching. Who is in the batch is decided anew before every forward pass.

`scheduler.py` is what this stage teaches: who runs next, and how many of its tokens. `request.py` is what it decides about,
`cache.py` holds the keys and values in slots, and `engine.py` makes steps of it: schedule, run, sample, postprocess.
"""

QUESTION: str = "Requests come and go at any time: why should the batch wait for its last row?"
FIRST_FILE: str = "scheduler.py"
