"""An exercise of a stage, as its `tasks.py` states it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One exercise of a stage.

    file: the stage's file, "scheduler.py". functions: their qualified names in it,
    "Scheduler.schedule".
    title: one line. text: what to write. hints: in steps, from a nudge to nearly the code.
    tests: the pytest ids that judge it, within the stage, "tests/test_scheduler.py::test_x" or a
        whole file. They start no process, take under 30 s together, and each of them calls the
        task's functions.
    """

    number: int
    file: str
    functions: tuple[str, ...]
    title: str
    text: str
    points: int
    hints: tuple[str, ...]
    tests: tuple[str, ...]

    def judged_by(self, test: str) -> bool:
        """Whether `test`, a pytest id within the stage, is one of its tests. Parameters in brackets
        do not matter."""
        name = test.partition("[")[0]
        return any(name == owned or name.startswith(f"{owned}::") for owned in self.tests)
