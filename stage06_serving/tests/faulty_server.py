"""The server with passes that fail on command: `python -m stage06_serving.tests.faulty_server`.

Everything is real; only `run` of the engine's runner is wrapped, here and not in the product. The
fault is named in a file, which is read before every pass.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shared import cli
from stage06_serving import __main__ as program
from stage06_serving.settings import Settings

VARIABLE = "FAULT_FILE"
MODULE = "stage06_serving.tests.faulty_server"


@dataclass(frozen=True)
class Fault:
    """The fault in `file`: "loading" waits before the model is loaded, "once" raises in the next
    pass, and a number makes every pass longer by that many seconds."""

    file: Path

    def plant(self, fault: str) -> None:
        """Atomic: a reader sees all of the new text or all of the old."""
        new = self.file.with_suffix(".new")
        new.write_text(fault, encoding="utf-8")
        os.replace(new, self.file)

    def read(self) -> str:
        try:
            return self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def before(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A pass with the fault before it."""

        def run(*arguments: Any) -> Any:
            fault = self.read()
            if fault == "once":
                self.file.unlink()
                raise RuntimeError("a planted fault")
            if fault:
                time.sleep(float(fault))
            return forward(*arguments)

        return run


def make_engine(
    settings: Settings, make: Callable[..., program.Served] = program.make_engine
) -> program.Served:
    """The program's own engine, with the fault if the variable names one."""
    fault = Fault(Path(os.environ[VARIABLE])) if VARIABLE in os.environ else None
    while fault and fault.read() == "loading":
        time.sleep(0.005)
    served = make(settings)
    if fault:
        served.engine.runner.run = fault.before(served.engine.runner.run)
    return served


def many(argv: list[str] | None) -> None:
    """Serve in a thread for each line of standard input: a command line and variables, as JSON.

    A server takes seconds to start, nearly all of them to load PyTorch: tests that neither stop
    theirs nor look at its process share one.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # threads cannot set it
    usual = dict(os.environ)
    for line in sys.stdin:  # the next line follows when this server answers
        arguments, variables = json.loads(line)
        os.environ.clear()
        os.environ.update(usual | variables)
        threading.Thread(target=partial(cli.run, program.main, arguments), daemon=True).start()


if __name__ == "__main__":
    program.make_engine = make_engine
    cli.run(many if sys.argv[1:] == ["many"] else program.main)
