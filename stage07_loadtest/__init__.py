"""Stage 07: a load test for any OpenAI-style server, with checks of its own measurements.

It speaks HTTP and imports no stage.
"""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait

QUESTION = "How long do users wait when there are many of them, and why trust the number?"
FIRST_FILE = "metrics.py"
