"""How OpenMP's threads wait for each other, chosen before PyTorch loads OpenMP.

After each operation the team of threads that PyTorch computes with waits for the next one. By
default a waiting thread spins: it checks again and again. On an idle machine nothing is faster:
sleeping threads took 1.7 times as long for a token of the embedded model. Beside other programs,
spinning uses up the time that the team's other threads need: on two processors, a token took 4
times its share of the time beside two busy programs, and 13 times beside eight; with sleeping
threads it took less than its share. OMP_WAIT_POLICY in the environment overrides the choice.
"""

from __future__ import annotations

import os
from pathlib import Path

BUSY = 0.5  # processors in use by other programs, on average over the last minute


def choose() -> str:
    """Let waiting threads sleep if the machine is busy: it was during the last minute, and at this
    moment another thread wants to run. Returns the policy: "PASSIVE" is to sleep, "" to spin."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1
    except OSError:  # not on Linux
        running = 1
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY and running > 0:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return os.environ.get("OMP_WAIT_POLICY", "")
