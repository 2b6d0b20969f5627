"""What no stage teaches: loading, the command line, measuring, charts, exercises.

Importing it settles how OpenMP's threads wait: PyTorch reads that once, when it is loaded.
"""

import sys

from . import openmp, program

if sys.argv[:1] == ["-m"]:  # a program whose package Python looks up
    program.begin()
openmp.choose()
