"""The cache's memory: its size, and the blocks it holds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psutil

from shared.config import Config
from shared.errors import UserError

from .blocks import BlockPool

if TYPE_CHECKING:  # the command line reads sizes before PyTorch is imported
    import torch

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SEQUENCES = 8  # default concurrency; the default pool holds this many whole contexts
SHARE = 0.5  # of the free memory: at most this goes to a default pool


def parse_memory(text: str, free: int) -> int:
    """Bytes of a size such as "512MiB", "2GB", "1000000", or "25%" of the `free` bytes.

    Raises UserError for anything else, and for more than is free.

    >>> parse_memory("25%", 1000)
    250
    """
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]*|%)\s*", text)
    if match is None or (match[2] != "%" and match[2].upper() not in UNITS):
        raise UserError(
            f"'{text}' is not a valid size: "
            "write 512MiB, 2GB, or 25% for a share of the free memory."
        )
    number = float(match[1])
    amount = int(number * free / 100 if match[2] == "%" else number * UNITS[match[2].upper()])
    if amount > free:
        raise UserError(
            f"{text} of memory is more than the {size(free)} that are free: "
            "give less, or a share such as 50%."
        )
    return amount


def free_memory(device: torch.device | str = "cpu") -> int:
    """Free bytes on `device`. An Apple GPU shares the machine's memory."""
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def size(nbytes: float) -> str:
    """A number of bytes for display: "3.5 GiB", "12 MiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if nbytes >= unit:
            amount = nbytes / unit
            return f"{amount:.1f} {name}" if amount < 10 else f"{amount:.0f} {name}"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 2**10 else f"{nbytes:.0f} bytes"


def block_bytes(config: Config, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block: keys and values of its tokens in all layers."""
    return block_size * config.kv_bytes_per_token(dtype)


def make_pool(memory: int, config: Config, dtype: torch.dtype, block_size: int = 16) -> BlockPool:
    """The pool of all whole blocks that fit into `memory` bytes. Raises UserError if none does."""
    block = block_bytes(config, dtype, block_size)
    if block_size > 0 and memory < block:
        raise UserError(
            f"A block of {block_size} tokens of {config.name} takes {size(block)}, but the cache "
            f"has {size(memory)}: give it more memory, or choose smaller blocks."
        )
    return BlockPool(memory // block if block_size > 0 else 1, block_size)


def default_memory(
    config: Config, dtype: torch.dtype, sequences: int, free: int, block_size: int = 16
) -> int:
    """Bytes of a default pool: `sequences` whole contexts, but at most half of the `free` bytes."""
    blocks = -(-config.n_positions // block_size)
    return min(sequences * blocks * block_bytes(config, dtype, block_size), int(SHARE * free))
