"""Checks in seconds whether this machine is ready: `python -m shared.doctor`.

Prints a line a check: ok, note (it works; good to know) or WRONG with what to do. Exit status 0 if
nothing is wrong, else 1. It changes nothing and uses no network, and imports only the standard
library at first, because it must run where nothing is installed yet.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence

from .paths import ROOT

INSTALL = "python -m pip install -r requirements.txt"
GIB = 2**30
PROMPT, TOKENS = "Once upon a time", 21
# Greedy, in float32. The second-best logit is always more than 0.01 behind.
STORY = " there lived a gentle girl. Her name was Mira, and her home was a village under the "

Check = Iterator[tuple[str, str]]  # "ok", "note" or "WRONG", and a sentence


def python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = sys.version_info >= (3, 11)
    yield ("ok", version) if fits else ("WRONG", f"{version}: install 3.11 or newer")


def packages() -> Check:
    """Whether every package has its pinned version; any newer torch works."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    for name, version in pins:
        try:
            present = importlib.metadata.version(name).partition("+")[0]  # "+cpu" names a build
        except importlib.metadata.PackageNotFoundError:
            present = "missing"
        if present != version and (name != "torch" or present == "missing"):
            yield "WRONG", f"{name} is {present} instead of {version}: {INSTALL}"
    yield "ok", f"{len(pins)} are listed in requirements.txt"


def machine() -> Check:
    import psutil
    import torch

    from . import measure, openmp

    cpus, threads = measure.cpus(), torch.get_num_threads()
    yield "ok", f"{measure.processor()}, PyTorch uses {torch.backends.cpu.get_cpu_capability()}"
    waits = "asleep" if openmp.choose() == "PASSIVE" else "by spinning"
    fits = threads <= cpus
    advice = "" if fits else f": set OMP_NUM_THREADS={cpus}"
    yield "ok" if fits else "note", f"{threads} threads on {cpus} CPUs wait {waits}{advice}"
    free = psutil.virtual_memory().available / GIB
    enough = "" if free >= 4 else ": close programs before you measure the shape of GPT-2 (4 GiB)"
    yield "note" if enough else "ok", f"{free:.1f} GiB of memory are free{enough}"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, and none is needed"
    yield "ok", f"GPU: {gpu}"


def kernels() -> Check:
    """The instructions for which stage 09 compiles its kernels here."""
    from . import registry

    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield "note", "no C compiler (cc, gcc, clang): stage 09's kernels need one"
    else:
        level = registry.load("stage09_kernels.library:levels")()[0]
        yield "ok", f"the kernels are compiled for {level}"


def model() -> Check:
    """Whether the embedded model continues a story with the right tokens."""
    from . import checkpoint, models, registry
    from .tokenizer import load_tokenizer

    loaded = checkpoint.load("stories")
    tokenizer = load_tokenizer(loaded.folder)
    engine = registry.load(registry.ENGINES["forward"])(models.load_model(loaded))
    sampling = registry.load("stage01_forward.params:SamplingParams")(max_tokens=TOKENS)
    (output,) = engine.generate([tokenizer.encode(PROMPT)], sampling)
    text = tokenizer.decode(output.token_ids)
    right = text.startswith(STORY)
    yield ("ok", PROMPT + text) if right else ("WRONG", f"{text!r}: restore the files (git status)")


def main(argv: Sequence[str] | None = None) -> int:
    about = "Checks whether this machine is ready, and says what to do."
    argparse.ArgumentParser(prog="python -m shared.doctor", description=about).parse_args(argv)
    checks: list[Callable[[], Check]] = [python, packages, machine, kernels, model]
    wrong = False
    for check in checks:
        try:
            for state, sentence in check():
                wrong = wrong or state == "WRONG"
                print(f"{state:<6} {check.__name__:<9} {sentence}", flush=True)
        except Exception as error:
            print(f"WRONG  {check.__name__:<9} {type(error).__name__}: {error} ({INSTALL}?)")
            wrong = True
    print("Not ready." if wrong else "Ready.")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
