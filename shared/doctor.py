"""Checks in seconds whether this machine is ready: `python -m shared.doctor`.

Prints what it found, and for everything wrong what to do. Exit status 0 if nothing is wrong, else
1. It imports only the standard library at first: it must run where nothing is installed yet.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import sys
from collections.abc import Iterator

from .paths import ROOT

INSTALL = "python -m pip install -r requirements.txt"
PROMPT, TOKENS = "Once upon a time", 21
# Greedy, in float32. The second-best logit is always more than 0.01 behind.
STORY = " there lived a gentle girl. Her name was Mira, and her home was a village under the "


def wrong() -> Iterator[str]:
    """What is wrong with Python, with the packages (but any newer torch works), and with the story
    that the embedded model tells."""
    print(f"Python {platform.python_version()} on {platform.platform()}")
    if sys.version_info < (3, 11):  # noqa: UP036
        yield "Python is too old: install 3.11 or newer"
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    for name, pin in re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE):
        present = importlib.metadata.version(name).partition("+")[0]  # "+cpu" names a build
        if present != pin and name != "torch":
            yield f"{name} is {present} instead of {pin}: {INSTALL}"
    import torch

    from . import measure, models, registry
    from .tokenizer import load_tokenizer

    cpus, threads = measure.cpus(), torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads on {cpus} CPUs: {measure.processor()}")
    if threads > cpus:
        print(f"note: more threads than CPUs are slow: set OMP_NUM_THREADS={cpus}")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        print("note: no C compiler (cc, gcc, clang): stage 09's kernels need one")
    loaded = models.load("stories")
    tokenizer = load_tokenizer(loaded.folder)
    engine = registry.load(registry.ENGINES["forward"])(models.load_model(loaded))
    sampling = registry.load(registry.SAMPLING)(max_tokens=TOKENS)
    (output,) = engine.generate([tokenizer.encode(PROMPT)], sampling)
    text = tokenizer.decode(output.token_ids)
    print(PROMPT + text)
    if not text.startswith(STORY):
        yield "The embedded model tells another story: restore its files (git status)"


def main() -> int:
    status = 0
    try:
        for sentence in wrong():
            print(f"WRONG: {sentence}")
            status = 1
    except Exception as error:
        print(f"WRONG: {type(error).__name__}: {error} ({INSTALL}?)")
        status = 1
    print("Not ready." if status else "Ready.")
    return status


if __name__ == "__main__":
    sys.exit(main())
