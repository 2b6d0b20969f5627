"""How much memory the cache may take, how many blocks that is, and what it costs to take a sequence's blocks away."""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil
import torch

from shared import roofline
from shared.checkpoint import Config
from shared.errors import UserError

from .blocks import BlockPool

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
SHARE = 0.5  # of the free memory: what a pool takes at most if nobody says anything


def parse_memory(text: str, free: int) -> int:
    """Bytes: "512MiB", "2GB", "1000000", or "25%" of the `free` ones. Raises UserError for anything else, and for more than free.

    >>> parse_memory("25%", 1000)
    250
    """
    found = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]*|%)\s*", text)
    if found is None or (found[2] != "%" and found[2].upper() not in UNITS):
        raise UserError(
            f"'{text}' is no amount of memory: write 512MiB, 2GB, or 25% for a share of what is free."
        )
    number = float(found[1])
    amount = int(number * free / 100 if found[2] == "%" else number * UNITS[found[2].upper()])
    if amount > free:
        raise UserError(
            f"{text} of memory were asked for, and {size(free)} are free: give less, or a share such as 50%."
        )
    return amount


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that are free on `device`. An Apple GPU shares the machine's own memory."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def size(nbytes: float) -> str:
    """As people read it: "3.5 GiB", "12 MiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if nbytes >= unit:
            amount = nbytes / unit
            return f"{amount:.1f} {name}" if amount < 10 else f"{amount:.0f} {name}"
    return f"{nbytes / 2**10:.1f} KiB"


def block_bytes(config: Config, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block: the keys and values of its tokens in all layers."""
    return block_size * config.kv_bytes_per_token(dtype)


def make_pool(memory: int, config: Config, dtype: torch.dtype, block_size: int = 16) -> BlockPool:
    """The pool of all whole blocks that fit into `memory` bytes. Raises UserError if none does."""
    each = block_bytes(config, dtype, block_size)
    if block_size > 0 and memory < each:
        raise UserError(
            f"A block of {block_size} tokens of {config.name} takes {size(each)}, and the cache may take {size(memory)}: give it "
            "more memory, or make the blocks smaller."
        )
    return BlockPool(memory // each if block_size > 0 else 1, block_size)


def default_memory(
    config: Config, dtype: torch.dtype, sequences: int, free: int, block_size: int = 16
) -> int:
    """Bytes for a pool if nobody says how many: the blocks of `sequences` whole contexts, but no more than half of what is
    `free`."""
    blocks = -(-config.n_positions // block_size)
    return min(sequences * blocks * block_bytes(config, dtype, block_size), int(SHARE * free))


def most_sequences(pool: BlockPool, tokens: int) -> int:
    """The most sequences of `tokens` tokens each that fit into the pool together, if they share nothing."""
    return pool.count // pool.blocks_for(tokens)


@dataclass(frozen=True)
class Cost:
    """What preemption costs: seconds to compute a sequence's tokens again, and to move its blocks out and in again.

    recompute: the operations of one pass over the tokens, at `flops` operations a second. The weights are read anyway, for the
        others in the pass.
    swap: the blocks are copied twice, at `bandwidth` bytes a second; each copy has `overhead` seconds before its first byte.

    The rates are those of the engine that asks, measured by it: see `Engine.measure_cost`.
    """

    config: Config
    dtype: torch.dtype
    flops: float
    bandwidth: float
    overhead: float = 0.0

    def recompute(self, tokens: int) -> float:
        """Seconds to compute `tokens` tokens again."""
        return roofline.forward_cost(self.config, self.dtype, tokens, sampled=0).flops / self.flops

    def swap(self, tokens: int) -> float:
        """Seconds to move the blocks of `tokens` tokens out and in again."""
        return 2 * (
            self.overhead + tokens * self.config.kv_bytes_per_token(self.dtype) / self.bandwidth
        )

    def cheaper(self, tokens: int) -> str:
        """ "swap" or "recompute" for a sequence of which `tokens` tokens are computed."""
        return "swap" if self.swap(tokens) < self.recompute(tokens) else "recompute"
