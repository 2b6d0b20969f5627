"""What all stages stand on: checkpoints, tokenizers, the command line, measuring, charts.

Importing this package settles how OpenMP's threads wait, because PyTorch reads that only once, when
it is loaded.
"""

from . import openmp

openmp.choose()
