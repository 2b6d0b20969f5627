"""Collective calls: what the ranks of a model tell each other, by `torch.distributed`.

Everything that waits for another rank waits for a limited time: a rank may stop at any moment, in
the middle of a pass or between two commands, and a socket to a process that stands still never
fails by itself.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = 4.0  # seconds that a rank waits for another one in a pass before it gives all up
IDLE = timedelta(days=365)  # between two commands: a rank whose rank 0 has died knows at once
BLOCK = 4096  # bytes of a command that are broadcast at once; few commands are longer
LENGTH = 8  # bytes of the length that precedes a command


class Collectives:
    """The calls of rank `rank` of `size`. They need `connect` first, and each of them all ranks. A
    process can be in one group of ranks at a time."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._timeout = timedelta(seconds=TIMEOUT)

    def connect(self, file: str, timeout: float) -> None:
        """Meet the other ranks at `file`, which all can reach. Afterwards a call that waits
        `timeout` seconds for another rank raises RuntimeError; if that rank has died, at once."""
        # No other machine may take part, whatever this one's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        self._timeout = timedelta(seconds=timeout)
        place: Any = {"rank": self.rank, "world_size": self.size, "timeout": IDLE}
        dist.init_process_group("gloo", store=dist.FileStore(file, self.size), **place)

    def disconnect(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, equal to the last bit on all of them; in place."""
        if self.size > 1:
            dist.all_reduce(x, async_op=True).wait(self._timeout)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """On rank 0, the x of every rank, all of one shape; on the other ranks, nothing."""
        if self.size == 1 or not x.numel():
            return [x] * self.size
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts, async_op=True).wait(self._timeout)
        return parts or []

    def send_command(self, kind: str, *arguments: Any) -> None:
        """Broadcast a command from rank 0: integers, and lists of them. As JSON: what a socket
        brings is never unpickled, which could run anything."""
        if self.size > 1:
            data = json.dumps([kind, *arguments]).encode()
            message = bytearray((len(data).to_bytes(LENGTH, "big") + data).ljust(BLOCK))
            tensor = torch.frombuffer(message, dtype=torch.uint8)
            for part in (tensor[:BLOCK], tensor[BLOCK:]):
                if len(part):
                    dist.broadcast(part, 0, async_op=True).wait(self._timeout)

    def receive_command(self) -> list[Any]:
        """Receive the next command, on another rank: its kind and its arguments. Raises
        RuntimeError once rank 0 has gone."""
        message = self._receive(BLOCK)
        end = LENGTH + int.from_bytes(message[:LENGTH], "big")
        if end > BLOCK:
            message += self._receive(end - BLOCK)
        command: list[Any] = json.loads(message[LENGTH:end])
        return command

    def _receive(self, count: int) -> bytes:
        part = torch.empty(count, dtype=torch.uint8)
        dist.broadcast(part, 0)
        return part.numpy().tobytes()
