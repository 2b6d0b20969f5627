"""What no stage teaches: loading, the command line, measuring, charts, exercises.

Importing it settles how OpenMP's threads wait: PyTorch reads that once, when it is loaded.
"""

from . import openmp

openmp.choose()
