"""How OpenMP's threads wait for each other, chosen before PyTorch loads OpenMP.

PyTorch computes with a team of threads, and after each operation the team waits for the next one.
By default waiting threads spin: they check again and again, for some milliseconds, before they
sleep. On an idle machine nothing is faster: sleeping threads took 1.7 times as long for one token
of the embedded model. Beside programs that want the same processors, spinning uses up time that the
team's other threads need. On two processors, a token took 4 times its fair share of the time beside
two busy programs, and 13 times beside eight; with sleeping threads it took less than its share. No
number of spins suits both: 10,000 were 12 % slower than the default on the idle machine, and twice
as slow as the share on the busy one.

So the machine is measured once, when a program starts. An idle machine keeps the default; on a busy
one threads sleep at once (OMP_WAIT_POLICY=PASSIVE). The choice holds until the program ends. Any of
`VARIABLES` in the environment overrides it. Programs started by this one measure again, or inherit
the choice if it was to sleep.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # GNU's OpenMP, and LLVM's
INTERVAL = 0.1  # seconds to measure for
BUSY = 0.5  # processors in use by other programs

_choice = ""


def in_use(interval: float = INTERVAL) -> float | None:
    """The processors that other programs use, such as 1.0; None if psutil is not installed.

    This program sleeps meanwhile, for `interval` seconds.
    """
    try:
        import psutil
    except ImportError:
        return None
    return psutil.cpu_percent(interval) / 100 * (psutil.cpu_count() or 1)


def choose(environ: MutableMapping[str, str] = os.environ) -> str:
    """Set OMP_WAIT_POLICY in `environ` if the machine is busy and nothing else was requested.

    Returns how threads wait, and why, to follow "they wait". Only the first call chooses.
    """
    global _choice
    if not _choice:
        settings = [f"{name}={environ[name]}" for name in VARIABLES if name in environ]
        if settings:
            _choice = f"as {', '.join(settings)} demands"
        elif "torch" in sys.modules:
            _choice = "by spinning: PyTorch was loaded before this could be chosen"
        elif (used := in_use()) is None:
            _choice = "by spinning: psutil is missing, so the machine was not measured"
        elif used < BUSY:
            _choice = "by spinning, the fastest on an idle machine"
        else:
            environ["OMP_WAIT_POLICY"] = "PASSIVE"
            _choice = f"asleep: other programs used {used:.1f} processors at the start"
    return _choice
