"""What no stage teaches: loading, the command line, measuring, charts, exercises.

Importing it settles how OpenMP's threads wait: PyTorch reads that once, when it is loaded.
"""

import signal
import sys

from . import openmp

if sys.argv[:1] == ["-m"]:  # a program whose package Python looks up
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of imports; until cli.run
    if sys.stderr is not None and sys.stderr.isatty():
        print("[starting ...]", file=sys.stderr, flush=True)  # PyTorch takes a second or more
openmp.choose()
