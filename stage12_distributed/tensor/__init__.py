"""One model on several processes, each with a part of every matrix."""

TIMEOUT = 4.0  # seconds that a rank waits for another one before it gives all of them up
