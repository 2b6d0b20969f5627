"""Results and charts of every machine that was measured, and what makes them: README.md."""

import shared  # noqa: F401  before PyTorch: it chooses how OpenMP's threads wait
