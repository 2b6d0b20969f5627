"""Everything that no stage teaches: loading, the command line, measuring, charts, exercises.

Importing this package settles how OpenMP's threads wait, because PyTorch reads that only once, when
it is loaded.
"""

import sys

from . import openmp, program

if sys.argv[:1] == ["-m"]:  # Python is looking up a program's package
    program.begin()
openmp.choose()
