"""llama.cpp as an engine that gives logits and nothing else, in a process of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from shared.checkpoint import Checkpoint
from shared.errors import UserError

from . import folder
from .install import ENGINES, HERE, HOME

NAME = "llama.cpp"


@contextmanager
def scorer(shape: Checkpoint, weights: str) -> Iterator[Any]:
    """An engine whose runner has the `run` of one share, with `weights` that llama.cpp makes of
    those of `shape`. Raises UserError if llama.cpp is not installed for `reports.peers`."""
    engine = ENGINES[NAME]
    python = HOME / engine.driver / "bin" / "python"
    if not python.exists():
        raise UserError(f"{NAME} is not installed: run python -m reports.peers first.")
    config, threads = shape.config, torch.get_num_threads()
    place = folder.write(shape, HOME / "models" / f"{config.name}-weights")
    command = [str(python), str(HERE / "logits.py"), str(place), weights, str(threads)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=engine.environment(threads), **pipes) as process:
        texts, logits = process.stdin, process.stdout
        assert texts is not None and logits is not None

        def run(ids: Sequence[int], shares: Any, rows: range) -> torch.Tensor:
            """Logits (rows, V) in float32. rows: from one place to the end."""
            texts.write(json.dumps({"ids": list(ids), "first": rows[0]}).encode() + b"\n")
            texts.flush()
            data = logits.read(4 * len(rows) * config.vocab_size)
            if len(data) < 4 * len(rows) * config.vocab_size:
                raise UserError(f"{NAME} has ended while it read a text.")
            return torch.frombuffer(bytearray(data), dtype=torch.float32).view(len(rows), -1)

        yield SimpleNamespace(runner=SimpleNamespace(run=run))
        texts.close()
