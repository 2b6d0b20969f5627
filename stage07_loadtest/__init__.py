"""Stage 07: the load test. It asks any OpenAI-style server what its users would see, and says how far to believe the answer.

It speaks HTTP and imports no stage.
"""

QUESTION = (
    "What do users wait when there are many of them, and how would we know that the figure is true?"
)
FIRST_FILE = "metrics.py"
