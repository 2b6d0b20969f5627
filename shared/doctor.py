"""Checks in seconds whether this machine is ready: `python -m shared.doctor`.

Prints a line a check: ok, note (it works; good to know) or WRONG with what to do. Exit status 0 if
nothing is wrong, else 1. It changes nothing and uses no network, and imports only the standard
library at first, because it must run where nothing is installed yet.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
from collections.abc import Iterator

from .paths import ROOT

INSTALL = "python -m pip install -r requirements.txt"
PROMPT, TOKENS = "Once upon a time", 21
# Greedy, in float32. The second-best logit is always more than 0.01 behind.
STORY = " there lived a gentle girl. Her name was Mira, and her home was a village under the "

Check = Iterator[tuple[str, str]]  # "ok", "note" or "WRONG", and a sentence


def packages() -> Check:
    """Whether Python and every package have their versions; any newer torch works."""
    version = ".".join(map(str, sys.version_info[:3]))
    fits = sys.version_info >= (3, 11)
    yield ("ok", version) if fits else ("WRONG", f"{version}: install Python 3.11 or newer")
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    for name, pin in pins:
        try:
            present = importlib.metadata.version(name).partition("+")[0]  # "+cpu" names a build
        except importlib.metadata.PackageNotFoundError:
            present = "missing"
        if present != pin and (name != "torch" or present == "missing"):
            yield "WRONG", f"{name} is {present} instead of {pin}: {INSTALL}"
    yield "ok", f"{len(pins)} are listed in requirements.txt"


def machine() -> Check:
    """Whether there are more threads than CPUs; and what stage 09 needs."""
    import torch

    from . import measure

    cpus, threads = measure.cpus(), torch.get_num_threads()
    words = f"{threads} threads on {cpus} CPUs ({measure.processor()})"
    fits = threads <= cpus
    yield ("ok", words) if fits else ("note", f"{words}: set OMP_NUM_THREADS={cpus}")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield "note", "no C compiler (cc, gcc, clang): stage 09's kernels need one"


def model() -> Check:
    """Whether the embedded model continues a story with the right tokens."""
    from . import models, registry
    from .tokenizer import load_tokenizer

    loaded = models.load("stories")
    tokenizer = load_tokenizer(loaded.folder)
    engine = registry.load(registry.ENGINES["forward"])(models.load_model(loaded))
    sampling = registry.load(registry.SAMPLING)(max_tokens=TOKENS)
    (output,) = engine.generate([tokenizer.encode(PROMPT)], sampling)
    text = tokenizer.decode(output.token_ids)
    right = text.startswith(STORY)
    yield ("ok", PROMPT + text) if right else ("WRONG", f"{text!r}: restore the files (git status)")


def main() -> int:
    wrong = False
    for check in (packages, machine, model):
        try:
            lines = list(check())
        except Exception as error:
            lines = [("WRONG", f"{type(error).__name__}: {error} ({INSTALL}?)")]
        for state, sentence in lines:
            wrong = wrong or state == "WRONG"
            print(f"{state:<6} {check.__name__:<9} {sentence}", flush=True)
    print("Not ready." if wrong else "Ready.")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
