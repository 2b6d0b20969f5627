"""The whole server, with a forward pass that fails when a test says so: `python -m stage06_serving.tests.faulty_server --port 0`.

Everything is the real thing; only the engine's `_forward` is wrapped, here and not in the product. What shall go wrong stands in
a file, which is read before every pass.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared import cli
from stage05_paged.engine import Engine
from stage05_paged.scheduler import Work
from stage06_serving import __main__ as program
from stage06_serving.settings import Settings

VARIABLE = "FAULT_FILE"
MODULE = "stage06_serving.tests.faulty_server"


@dataclass(frozen=True)
class Fault:
    """What goes wrong, in `file`: "once" and "always" raise in the pass, "exit" ends the thread, "block" waits until there is
    something else, and a number makes every pass longer by so many seconds."""

    file: Path

    def plant(self, what: str) -> None:
        """At once: whoever reads finds all of it or nothing."""
        new = self.file.with_suffix(".new")
        new.write_text(what, encoding="utf-8")
        os.replace(new, self.file)

    def mend(self) -> None:
        self.file.unlink(missing_ok=True)

    def read(self) -> str:
        try:
            return self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""


@dataclass(frozen=True)
class Faulty:
    """A forward pass with a fault before it."""

    forward: Callable[[list[Work]], torch.Tensor]
    fault: Fault

    def __call__(self, work: list[Work]) -> torch.Tensor:
        while (what := self.fault.read()) == "block":
            time.sleep(0.005)
        if what == "once":
            self.fault.mend()
        if what in ("once", "always"):
            raise RuntimeError("a planted fault")
        if what == "exit":
            raise SystemExit
        if what:
            time.sleep(float(what))
        return self.forward(work)


def make_engine(
    settings: Settings, make: Callable[..., tuple[Any, Any]] = program.make_engine
) -> tuple[Engine, Any]:
    """As the program's own, with the fault if there is to be one."""
    engine, loaded = make(settings)
    if VARIABLE in os.environ:
        engine._forward = Faulty(engine._forward, Fault(Path(os.environ[VARIABLE])))
    return engine, loaded


def until(condition: Callable[[], object], timeout: float = 60) -> None:
    """Wait until `condition` holds. Fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {timeout:g} s"
        time.sleep(0.01)


if __name__ == "__main__":
    program.make_engine = make_engine
    cli.run(program.main)
