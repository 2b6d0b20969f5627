"""One model on several processes, each with a part of every matrix."""
