"""Measures everything on this machine and redraws the reports: `python -m reports`.

Every stage's benchmark, the staircase and the peers that are installed run one after another, each
in a process of its own. What was measured at this commit already is left out, so an interrupted run
goes on where it ended. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from shared import cli, kit, measure, paths

from . import draw
from .peers.install import ENGINES

# How OpenMP's threads wait in all programs alike: as they do by default on an idle machine. Each
# would choose for itself, and find the machine still busy with the one before it.
WAITING = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"}


def programs() -> dict[str, str]:
    """The modules to run, by the names of their results."""
    every = {name: module.__name__ for name, module in draw.modules().items()}
    if not any(engine.packages and engine.is_installed for engine in ENGINES.values()):
        del every["peers"]  # no engine that does not come with this project
    return every


def measured(name: str) -> bool:
    """Whether this machine has results of this commit."""
    path = kit.results_file(name)
    commit, _ = measure.git_state()
    return path.exists() and json.loads(path.read_bytes()).get("commit") == commit


def main(argv: list[str] | None = None) -> int:
    examples = "  python -m reports\n  python -m reports --only stage02_kv_cache --again"
    parser = cli.Parser("reports", "Measures everything, and redraws the reports.", examples)
    parser.add_argument("--only", choices=programs(), help="measure this alone")
    parser.add_argument("--again", action="store_true", help="also what was measured already")
    options = parser.parse_args(argv)
    kit.clean_commit()
    failed = 0
    for name, module in programs().items():
        if options.only not in (None, name) or (measured(name) and not options.again):
            continue
        print(f"{name} ...", flush=True)
        started = time.time()
        command, environment = [sys.executable, "-m", module], os.environ | WAITING
        run = subprocess.run(command, env=environment, cwd=paths.ROOT, stdin=subprocess.DEVNULL)
        if run.returncode:
            print(f"failed: python -m {module}", file=sys.stderr)  # the others are worth having
            failed += 1
        print(f"{name}: {(time.time() - started) / 60:.1f} minutes", flush=True)
    machine = measure.slug(measure.machine())  # the texts show it once it has all results
    return draw.report(paths.ROOT, "" if failed or options.only else machine) or failed


if __name__ == "__main__":
    cli.run(main)
