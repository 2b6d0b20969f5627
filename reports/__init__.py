"""Results and charts of every machine that was measured, and what makes them: README.md."""

from shared import openmp

openmp.choose()  # before PyTorch is loaded
