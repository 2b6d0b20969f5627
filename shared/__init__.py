"""What no stage teaches: loading, the command line, measuring, charts, exercises.

Importing it settles how OpenMP's threads wait: PyTorch reads that once, when it is loaded.
"""

import sys

from . import openmp

if sys.argv[:1] == ["-m"] and sys.stderr.isatty():  # a program whose package Python looks up
    print("[starting ...]", file=sys.stderr, flush=True)  # PyTorch takes a second or more to load
openmp.choose()
