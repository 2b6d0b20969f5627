"""Stage 07: a load test for any OpenAI-style server, with checks of its own measurements.

It speaks HTTP and imports no stage.
"""

from shared import openmp

QUESTION = "How long do users wait when there are many of them, and why trust the number?"
FIRST_FILE = "metrics.py"

openmp.choose()  # before PyTorch is loaded
