"""The cost of the way that PyTorch's threads wait: `python -m shared.course.waiting`, in a minute.

`shared/openmp.py` chooses how they wait when a program starts. Here two programs make tokens in
turn, one with that choice and one whose threads always spin, as is usual: alone, and beside other
programs that are always busy. A token's fair share of the time is what spinning threads take alone,
divided by the share of the processors that the busy programs leave. The choice may cost 2 % alone,
and twice its share beside others. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .. import cli, openmp, paths

SPIN = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}  # what OpenMP does if nothing is set
MOST = {0: 1.02, 1: 2.0, 2: 2.0}  # by busy programs: the share of the time that is allowed
TOKENS = 40
SECONDS = 12.0  # of measuring for each number of busy programs, but at least ROUNDS
ROUNDS = 3
PROGRAM = f"""
import sys, time
from shared import checkpoint, linear, openmp
from shared.course import stages
model = stages.load_model(checkpoint.load("stories"))
linear.optimize(model, "packed")
engine = stages.engines()["stage02_kv_cache"](model)
params = stages.sampling_params()(max_tokens={TOKENS}, ignore_eos=True)
engine.generate([[*range(50, 66)]], params)
print(openmp.choose(), flush=True)
for _ in sys.stdin:
    started = time.perf_counter()
    engine.generate([[*range(50, 66)]], params)
    print((time.perf_counter() - started) / {TOKENS}, flush=True)
"""


@contextmanager
def program(code: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that ends with the block."""
    clean = {name: text for name, text in os.environ.items() if name not in openmp.VARIABLES}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=paths.ROOT,
        env=clean | environ,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process
        process.kill()


def ask(process: subprocess.Popen[str]) -> float:
    """Seconds per token of one answer."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def measure(busy: int) -> tuple[str, float, float]:
    """Beside `busy` programs: the choice in words, and seconds per token with it and with
    spinning."""
    times: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        for _ in range(busy):
            stack.enter_context(program("while True: pass"))
        time.sleep(0.5)  # until they are busy
        pair, words = [], []
        for environ in ({}, SPIN):  # one after the other: each measures the machine at its start
            pair.append(stack.enter_context(program(PROGRAM, **environ)))
            assert pair[-1].stdout is not None
            words.append(pair[-1].stdout.readline().strip())
        end = time.perf_counter() + SECONDS
        while len(times[0]) < ROUNDS or time.perf_counter() < end:
            for process, seconds in zip(pair, times, strict=True):
                seconds.append(ask(process))
    chosen, spinning = map(statistics.median, times)
    return words[0], chosen, spinning


def main(argv: list[str] | None = None) -> int:
    name = "shared.course.waiting"
    about = "Measures the cost of the way that PyTorch's threads wait, alone and beside others."
    cli.Parser(name, about, f"  python -m {name}").parse_args(argv)
    bad, alone = 0, 0.0
    for busy, most in MOST.items():
        words, chosen, spinning = measure(busy)
        alone = alone or spinning
        fair = alone * (1 + busy / (os.cpu_count() or 1))
        bad += chosen > most * fair
        print(
            f"beside {busy} busy programs: {chosen * 1e3:.2f} ms a token, {chosen / fair:.2f} of "
            f"its share (at most {most:g}); spinning {spinning / fair:.2f}; it waits {words}",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    cli.run(main)
