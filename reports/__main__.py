"""Runs every benchmark on this machine and redraws the reports: `python -m
reports`.

Every stage's benchmark and the staircase run one after another, each in its own process. Nothing
else should run meanwhile. With --device cuda or mps only the staircase runs, because the benchmarks
of the stages measure the processor.
"""

from __future__ import annotations

import subprocess
import sys

from tqdm import tqdm

from shared import cli, paths


def commands(quick: bool, device: str) -> list[list[str]]:
    """The commands to run, in order, as the words after `python`."""
    files = [(name, stem) for name in paths.discover() for stem in ("benchmark", "losses")]
    programs = [
        ["-m", f"{name}.{stem}"]
        for name, stem in files
        if device == "cpu" and (paths.ROOT / name / f"{stem}.py").exists()
    ]
    programs.append(["-m", "reports.staircase", "--device", device])
    if quick:
        return [[*words, "--quick"] for words in programs]
    return [*programs, ["-m", "reports.draw"]]


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "reports",
        "Measures every stage and the staircase on this machine, and redraws the reports. It "
        "takes two hours and more on two cores; leave the machine alone meanwhile.",
        "  python -m reports --quick\n  python -m reports --device cuda",
    )
    about = "small grids, in about a quarter of an hour; nothing is kept"
    parser.add_argument("--quick", action="store_true", help=about)
    devices = ("cpu", "cuda", "mps")
    parser.add_argument("--device", choices=devices, default="cpu", help="what to compute on")
    options = parser.parse_args(argv)
    cli.choose_device(options.device)
    failed = 0
    for command in tqdm(commands(options.quick, options.device), unit="benchmark"):
        words = " ".join(["python", *command])
        print(f"\n=== {words}", flush=True)
        run = [sys.executable, *command]
        if subprocess.run(run, cwd=paths.ROOT, stdin=subprocess.DEVNULL).returncode:
            print(f"failed: {words}", file=sys.stderr)
            failed = 1  # the others' results are still worth having
    return failed


if __name__ == "__main__":
    cli.run(main)
