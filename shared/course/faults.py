"""Planted faults: small mistakes in the code, each of which the tests must see.

    python -m shared.course.faults stage09_kernels --only bfloat16 --jobs 2

A stage's `tests/faults.json` (and `shared/tests/faults.json`) is a list of objects: `file`; `old`,
which occurs once in it; `new`, which replaces it; `what`, the fault's name; `tests`, the test files
or ids that should fail; and `reason` for a fault that no test can see. Each is planted in a copy of
the project, in a temporary folder with its own cache of compiled kernels: the checkout stays as it
is. A test that fails, crashes or hangs has killed the fault. Takes 5 to 20 s a fault. The exit
status is 1 if a fault without a reason survived, or a list is stale.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from .. import cli, paths
from ..errors import UserError
from . import links

KILLED, SURVIVED = "killed", "survived"
SECONDS = 120.0  # for the tests of a fault; they have killed it if they take longer
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*cache", "__pycache__", "mine")
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Fault:
    """One entry of a list; `stage` is the folder whose list it is."""

    stage: str
    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]
    reason: str = ""


def read(stage: str) -> list[Fault]:
    """The faults of a stage, or of "shared"; without tests of their own, they have all of its."""
    path = paths.ROOT / stage / "tests" / "faults.json"
    entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    everything = [f"{stage}/tests"]
    return [
        Fault(stage, **entry | {"tests": tuple(entry.get("tests", everything))})
        for entry in entries
    ]


def problems(faults: Sequence[Fault]) -> Iterator[str]:
    """What is wrong with the lists as they are written, found without running anything."""
    names = Counter((fault.stage, fault.what) for fault in faults)
    yield from (f"{stage}: two faults: {what}" for (stage, what), n in names.items() if n > 1)
    for fault in faults:
        name, path = f"{fault.stage}: {fault.what}", paths.ROOT / fault.file
        count = path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0
        if count != 1:
            yield f"{name}: its old text occurs {count} times in {fault.file}"
        if fault.old == fault.new:
            yield f"{name}: it changes nothing"
        absent = [test for test in fault.tests if not links.is_test(test)]
        yield from (f"{name}: there is no test {test}" for test in absent)


class Copy:
    """A copy of the project in `folder`, in which one fault at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.root, self.cache = folder / "project", folder / "cache"
        self.output = folder / "output"  # of the last tests
        shutil.copytree(paths.ROOT, self.root, ignore=LEFT_OUT)
        self.process: subprocess.Popen[str] | None = None

    def passes(self, tests: Sequence[str], seconds: float | None = None) -> bool:
        """Whether `tests` pass within `seconds`; `output` has what they print."""
        environ = os.environ | {"XDG_CACHE_HOME": str(self.cache)}
        environ["OMP_WAIT_POLICY"] = "PASSIVE"  # several copies share the cores
        if seconds is not None:  # the bytecode of a fault must not outlive it
            environ["PYTHONDONTWRITEBYTECODE"] = "1"
        with self.output.open("w") as output:
            process = self.process = subprocess.Popen(
                [*PYTEST, *tests],
                cwd=self.root,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # what the tests start ends with them
                text=True,
            )
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.stop()

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:  # its tests may have ended, and what they started goes on
            if sys.platform == "win32":  # has no groups
                process.kill()
            else:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def try_out(self, fault: Fault) -> str:
        """KILLED or SURVIVED."""
        path = self.root / fault.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        try:
            return SURVIVED if self.passes(fault.tests, SECONDS) else KILLED
        finally:
            path.write_text(text, encoding="utf-8")


def run(faults: Sequence[Fault], jobs: int) -> Iterator[tuple[Fault, str, float]]:
    """Each fault with its outcome and its seconds, in the order in which they end. Raises UserError
    if tests fail without any fault."""
    with tempfile.TemporaryDirectory(prefix="staircase-faults-") as folder:
        copies = [Copy(Path(folder) / str(number)) for number in range(jobs)]
        tests = dict.fromkeys(test for fault in faults for test in fault.tests)
        for copy in copies:  # also fills each copy's caches
            if not copy.passes(list(tests)):
                output = copy.output.read_text(encoding="utf-8")
                raise UserError(f"The tests fail without a fault: {output[-2000:]}")
        idle: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            idle.put(copy)

        def judge(fault: Fault) -> tuple[Fault, str, float]:
            copy, started = idle.get(), time.monotonic()
            try:
                return fault, copy.try_out(fault), time.monotonic() - started
            finally:
                idle.put(copy)

        pool = ThreadPoolExecutor(jobs)
        try:
            for future in as_completed([pool.submit(judge, fault) for fault in faults]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            pool.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(
        "shared.course.faults",
        __doc__,
        "  python -m shared.course.faults stage05_paged --jobs 2\n"
        "  python -m shared.course.faults --only linear.c",
    )
    places = ["shared", *paths.discover()]
    parser.add_argument("stage", nargs="*", help=f"of {', '.join(places)}; default: all of them")
    parser.add_argument(
        "--only",
        metavar="TEXT",
        nargs="+",
        default=[""],
        help="faults whose name or file has one of these texts; default: all",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="copies of the project side by side"
    )
    options = parser.parse_args(arguments)
    options.stage = options.stage or places
    if unknown := [stage for stage in options.stage if stage not in places]:
        parser.error(f"there is no stage {unknown[0]}: choose of {', '.join(places)}")
    faults = [fault for stage in options.stage for fault in read(stage)]
    faults = [
        fault
        for fault in faults
        if any(text in f"{fault.what} {fault.file}" for text in options.only)
    ]
    stale = list(problems(faults))
    if stale or not faults or options.jobs < 1:
        print("\n".join(stale) or "error: No such fault, or no job.", file=sys.stderr)
        return 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that the copies are removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    try:
        with tqdm(total=len(faults), unit="fault", disable=None) as bar:
            for fault, outcome, seconds in run(faults, options.jobs):
                if outcome == SURVIVED and fault.reason:
                    outcome = f"{SURVIVED} with a reason"
                outcomes[outcome] += 1
                words = f"{outcome} in {seconds:.0f} s: {fault.stage}: {fault.what}"
                tqdm.write(f"{words} ({fault.reason})" if fault.reason else words)
                bar.update()
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    c = sum(fault.file.endswith((".c", ".h")) for fault in faults)
    print(f"{len(faults)} faults, {c} in C: {shown}; {time.monotonic() - started:.0f} s")
    return int(outcomes[SURVIVED] > 0)


if __name__ == "__main__":
    sys.exit(main())
