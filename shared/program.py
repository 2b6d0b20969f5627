"""What every `python -m` command does before its own imports, which take seconds with PyTorch.

`shared/__init__.py` calls `begin` while Python looks the command up. So something is on the screen
at once; Ctrl-C and a missing package end the program without a traceback; and options are checked
before PyTorch loads, even if a program needs it from its first line.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from types import TracebackType
from typing import Any

INSTALL = "python3 -m venv .venv && .venv/bin/python -m pip install -r requirements.txt"
# All words that may follow, by the end of a module's name.
WORDS = {
    "benchmark": ("--quick", "--device", "cpu", "cuda"),
    "crosscheck": ("--quick",),
    "losses": ("--quick",),
    "draw": ("--check",),
}


_dying = False  # whether `die_at_interrupt` has set the handler


def die_at_interrupt() -> None:
    """Let Ctrl-C end the process at once, without a traceback, until another handler is set."""
    global _dying
    _dying = _replaced(signal.default_int_handler, signal.SIG_DFL)


def raise_at_interrupt() -> None:
    """After `die_at_interrupt`, let Ctrl-C raise KeyboardInterrupt again."""
    global _dying
    _dying = _dying and not _replaced(signal.SIG_DFL, signal.default_int_handler)


def _replaced(old: object, new: Any) -> bool:
    """Whether this has replaced the handler of Ctrl-C."""
    main = threading.current_thread() is threading.main_thread()  # no other can set handlers
    change = main and signal.getsignal(signal.SIGINT) is old
    if change:
        signal.signal(signal.SIGINT, new)
    return change


def begin() -> None:
    die_at_interrupt()  # until cli.run or cli.load_model_from
    sys.excepthook = explain
    if sys.stderr is not None and sys.stderr.isatty():
        print("[starting ...]", file=sys.stderr, flush=True)
    known = WORDS.get(sys.orig_argv[-len(sys.argv)].rpartition(".")[2])
    if known and (wrong := [w for w in sys.argv[1:] if w not in (*known, "-h", "--help")]):
        words = f"Unrecognized arguments: {' '.join(wrong)}; --help lists every option."
        print(f"error: {words}", file=sys.stderr)
        sys.exit(2)


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For sys.excepthook: a package that is not installed is one sentence, not a traceback."""
    from .paths import ROOT  # pathlib takes a while, in which Ctrl-C would be a traceback

    name = getattr(error, "name", None) or ""
    ours = "." in name or (ROOT / name).exists() or (ROOT / f"{name}.py").exists()
    if not isinstance(error, ModuleNotFoundError) or ours or importlib.util.find_spec(name):
        sys.__excepthook__(kind, error, trace)
        return
    print(
        f"error: The package {name} is not installed for {sys.executable}: run the command with "
        f".venv/bin/python (Windows: .venv\\Scripts\\python), after `{INSTALL}`.",
        file=sys.stderr,
    )
