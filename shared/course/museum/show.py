"""Runs symptoms, with the reference and with a copy, in processes of their own.

A bug may loop, fill the screen or end the process. So each process has a limit for its time and one
for its output.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from shared import paths
from shared.course import mine

from . import symptoms
from .exhibits import Exhibit, find

SECONDS = 20.0  # for a symptom, once everything is loaded
LOADING = 120.0  # for everything before that, on a slow disk
MOST = 4000  # characters shown


def show(exhibit: Exhibit, folders: Sequence[Path | None], seconds: float = SECONDS) -> list[str]:
    """The output of the symptom with the exhibit's file from each of the folders, run in parallel.

    None is the reference, which may take as long as it needs.
    """
    sides = [_start(exhibit, folder, LOADING if folder is None else seconds) for folder in folders]
    outputs = []
    for side in sides:
        try:
            output, _ = side.communicate(timeout=LOADING + seconds)
        except subprocess.TimeoutExpired:
            side.kill()
            output, _ = side.communicate()
            output += f"\n... and nothing more for {LOADING + seconds:g} s: stopped.\n"
        outputs.append(output if len(output) <= MOST else f"{output[:MOST]} ...\n")
    return outputs


def _start(exhibit: Exhibit, folder: Path | None, seconds: float) -> subprocess.Popen[str]:
    where = [] if folder is None else [str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "shared.course.museum.show", exhibit.name, str(seconds), *where],
        cwd=paths.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def _give_up(seconds: float) -> None:
    print(f"... without end: stopped after {seconds:g} s.", flush=True)
    os._exit(1)  # the main thread may be anywhere


def prepare(exhibit: Exhibit, folder: Path | None) -> None:
    """Load the exhibit's stage, with its file in `folder` in place of the reference's."""
    if folder is not None:
        mine.overlay(exhibit.stage, folder, [exhibit.file])
    importlib.import_module(f"{exhibit.stage}.{mine.dotted(exhibit.file)}")
    symptoms.stories()  # most need the model, and loading it must not count


def main() -> None:
    name, seconds, *folder = sys.argv[1:]
    exhibit = find(int(name))
    try:
        prepare(exhibit, Path(folder[0]) if folder else None)
        timer = threading.Timer(float(seconds), _give_up, [float(seconds)])
        timer.daemon = True
        timer.start()
        exhibit.symptom()
        timer.cancel()
    except Exception as error:  # a symptom too; a whole traceback would give away the place
        print("".join(traceback.format_exception_only(error)).strip(), flush=True)


if __name__ == "__main__":
    main()
