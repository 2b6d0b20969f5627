"""Measures everything there is on this machine, and redraws the reports: `python -m
shared.bench.benchmark_all`.

Every stage's benchmark and the staircase, one after the other in processes of their own: nothing
else should run meanwhile. With --device cuda or mps only the staircase runs, because the benchmarks
of the stages measure the processor.
"""

from __future__ import annotations

import subprocess
import sys
import time

from tqdm import tqdm

from .. import cli, paths


def commands(quick: bool, device: str) -> list[list[str]]:
    """What is run, in order, as words behind `python`."""
    every = [name for name in paths.discover() if (paths.ROOT / name / "benchmark.py").exists()]
    found = [["-m", f"{name}.benchmark"] for name in every if device == "cpu"]
    found.append(["-m", "shared.bench.staircase", "--device", device])
    if quick:
        return [[*words, "--quick"] for words in found]
    return [*found, ["-m", "shared.bench.report"]]


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "shared.bench.benchmark_all",
        "Measures every stage and the staircase on this machine, and draws the reports anew. It "
        "takes about three quarters of an hour on two cores; leave the machine alone meanwhile.",
        "  python -m shared.bench.benchmark_all --quick\n  python -m shared.bench.benchmark_all "
        "--device cuda",
    )
    about = "small grids, in about a quarter of an hour; nothing is kept"
    parser.add_argument("--quick", action="store_true", help=about)
    devices = ("cpu", "cuda", "mps")
    parser.add_argument("--device", choices=devices, default="cpu", help="what to compute on")
    options = parser.parse_args(argv)
    cli.choose_device(options.device)
    failed = []
    for command in tqdm(commands(options.quick, options.device), unit="benchmark"):
        words, started = " ".join(["python", *command]), time.perf_counter()
        print(f"\n=== {words}", flush=True)
        run = [sys.executable, *command]
        if subprocess.run(run, cwd=paths.ROOT, stdin=subprocess.DEVNULL).returncode:
            failed.append(words)  # the others are worth having all the same
        print(f"=== {time.perf_counter() - started:.0f} s", flush=True)
    for words in failed:
        print(f"failed: {words}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
