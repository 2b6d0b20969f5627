"""Measures everything on this machine and redraws the reports: `python -m reports`.

Every stage's benchmark, the staircase and the peers that are installed run one after another, each
in a process of its own. What was measured at this commit already is left out, so an interrupted run
goes on where it ended. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

from shared import cli, kit, measure, paths

from . import draw
from .peers.install import ENGINES

FULL = 60.0  # minutes that a whole run takes, at most
LAST = 180  # seconds before the end, in which nothing more is begun
MOST = 1500  # seconds for one benchmark: the peers start 17 engines


def programs() -> dict[str, str]:
    """The modules to run, by the names of their results."""
    every = {name: module.__name__ for name, module in draw.modules().items()}
    every = {"staircase": every.pop("staircase")} | every  # the first page shows it
    if not any(engine.packages and engine.is_installed for engine in ENGINES.values()):
        del every["peers"]  # no engine that does not come with this project
    return every


def measured(name: str) -> bool:
    """Whether this machine has results of this commit."""
    path = kit.results_file(name)
    commit, _ = measure.git_state()
    return path.exists() and json.loads(path.read_bytes()).get("commit") == commit


def run(module: str, effort: str) -> bool:
    """Whether a benchmark ended well, and in time."""
    command = [sys.executable, "-m", module, "--effort", effort]
    with subprocess.Popen(command, cwd=paths.ROOT, stdin=subprocess.DEVNULL) as program:
        try:
            program.wait(MOST)
        except subprocess.TimeoutExpired:
            program.send_signal(signal.SIGINT)  # it ends its own processes
    return program.returncode == 0


def main(argv: list[str] | None = None) -> int:
    examples = "  python -m reports\n  python -m reports --only stage02_kv_cache --again"
    parser = cli.Parser("reports", "Measures everything, and redraws the reports.", examples)
    about = f"minutes, after which nothing more is begun; under {FULL:.0f} repeats become fewer"
    parser.add_argument("--budget", type=float, default=FULL, help=about)
    parser.add_argument("--only", choices=programs(), help="measure this alone")
    parser.add_argument("--again", action="store_true", help="also what was measured already")
    options = parser.parse_args(argv)
    kit.clean_commit()
    effort, begun, missing = str(min(1.0, options.budget / FULL)), time.time(), []
    for name, module in programs().items():
        if options.only not in (None, name) or (measured(name) and not options.again):
            continue
        started = time.time()
        if started - begun > 60 * options.budget - LAST:
            missing.append(f"{name}: not begun, because the time is up; run this again to go on")
            continue
        print(f"{name} ...", flush=True)
        if not run(module, effort):
            missing.append(f"failed: python -m {module}")  # the others are still worth having
        print(f"{name}: {(time.time() - started) / 60:.1f} minutes", flush=True)
    for line in missing:
        print(line, file=sys.stderr)
    machine = measure.slug(measure.machine())  # the texts show it once it has all results
    return draw.report(paths.ROOT, "" if missing or options.only else machine) or len(missing)


if __name__ == "__main__":
    cli.run(main)
