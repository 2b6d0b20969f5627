"""Blocks: who owns which piece of the cache's memory. Plain Python, no tensors.

The memory for keys and values is cut into blocks of equal size, all taken once. A sequence has a table of the blocks it uses, in
the order of its positions, as a process has a page table (Kwon et al., "PagedAttention", SOSP 2023). A block may be in several
tables: its references are counted. A full block is known by the tokens it stands for and all tokens before them, so whoever
begins the same finds it; when nobody uses it any more it is kept until its memory is needed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.errors import UserError


class BlockPool:
    """`count` blocks of `block_size` tokens each, by number. Every call but `match` takes constant time a block.

    A block is free (nobody uses it and its content means nothing), cached (nobody uses it, and it can be found by its digest),
    or owned (`references[block]` tables hold it).
    """

    def __init__(self, count: int, block_size: int = 16) -> None:
        if count < 1:
            raise UserError(f"There must be at least 1 block, not {count}: give more memory.")
        if block_size < 1:
            raise UserError(f"A block holds at least 1 token, not {block_size}.")
        self.count, self.block_size = count, block_size
        self.references = [0] * count
        self.free = list(range(count - 1, -1, -1))  # a stack; the block used last is taken first
        self.cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.digests: list[bytes | None] = [None] * count  # of each block, as it was published
        self.found: dict[bytes, int] = {}  # digest -> block
        self.shared = 0  # blocks that several tables hold
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that `take` can give: the free ones and the cached ones."""
        return len(self.free) + len(self.cached)

    @property
    def owned(self) -> int:
        """Blocks that a table holds, or several do."""
        return self.count - self.available

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def take(self) -> int:
        """A block for one table. If none is free, the cached one that was used longest ago is evicted.

        Raises RuntimeError if all are owned: ask `available` first.
        """
        if self.free:
            block = self.free.pop()
        elif self.cached:
            block, _ = self.cached.popitem(last=False)
            self.forget(block)
            self.evictions += 1
        else:
            raise RuntimeError(f"all {self.count} blocks are owned")
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table holds `block`, which is owned or cached."""
        if not self.references[block]:
            if block not in self.cached:
                raise RuntimeError(f"block {block} is free: its content means nothing")
            del self.cached[block]
        self.references[block] += 1
        self.shared += self.references[block] == 2

    def give_back(self, block: int) -> None:
        """One table less holds `block`. With the last one it becomes cached if it was published, and free if not."""
        if not self.references[block]:
            raise RuntimeError(f"block {block} is given back, and no table holds it")
        self.references[block] -= 1
        self.shared -= self.references[block] == 1
        if not self.references[block]:
            if self.digests[block] is None:
                self.free.append(block)
            else:
                self.cached[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Let `block`, which is full and owned, be found. If another block is known by `digest`, that one stays."""
        if digest not in self.found and self.digests[block] is None:
            self.digests[block], self.found[digest] = digest, block

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest beginning of a chain of digests that is there, owned or cached."""
        blocks = []
        for digest in digests:
            if digest not in self.found:
                break
            blocks.append(self.found[digest])
        return blocks

    def forget(self, block: int) -> None:
        """Nobody shall find `block` any more."""
        digest = self.digests[block]
        if digest is not None:
            del self.found[digest]
            self.digests[block] = None


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full block: SHA-256 over the digest of the block before it and its own tokens.

    So it stands for everything from position 0 on, and equal tokens behind another beginning are another block. It is a
    cryptographic one because a server finds blocks by it: with a weak one a user could make prompts that collide, and be
    answered with another user's past.
    """
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


@dataclass
class BlockTable:
    """The blocks of one sequence: position p lies in blocks[p // block_size], at p % block_size.

    `digests` are those of its full blocks, as far as they have been worked out; they stay when the blocks are taken away. `salt`
    is the parent of the first: sequences with different salts never share by digest, say those of different tenants.
    """

    pool: BlockPool
    salt: bytes = b""
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def grow(self, tokens: int) -> list[int]:
        """Take what is missing for `tokens` tokens; the new blocks."""
        before = len(self.blocks)
        for _ in range(self.missing(tokens)):
            self.blocks.append(
                self.pool.take()
            )  # one by one: should the pool run out, those that were taken are not lost
        return self.blocks[before:]

    def missing(self, tokens: int) -> int:
        """Blocks to be taken before the table holds `tokens` tokens."""
        return max(0, self.pool.blocks_for(tokens) - len(self.blocks))

    def adopt(self, blocks: Iterable[int]) -> None:
        """Share blocks that were found, or are another table's, behind those that are there."""
        for block in blocks:
            self.pool.share(block)
            self.blocks.append(block)

    def is_shared(self, position: int) -> bool:
        """Whether a write at `position` would change what another table reads."""
        index = position // self.pool.block_size
        return index < len(self.blocks) and self.pool.references[self.blocks[index]] > 1

    def replace(self, position: int) -> tuple[int, int]:
        """Copy-on-write: an own block in place of the shared one at `position`. Returns (old, new): copy before you write."""
        index = position // self.pool.block_size
        old, new = self.blocks[index], self.pool.take()
        self.blocks[index] = new
        self.pool.give_back(old)
        return old, new

    def digest(self, tokens: Sequence[int]) -> list[bytes]:
        """All digests, once those of the full blocks of `tokens` are worked out, which follow the blocks digested so far."""
        size = self.pool.block_size
        for first in range(0, len(tokens) - size + 1, size):
            parent = self.digests[-1] if self.digests else hashlib.sha256(self.salt).digest()
            self.digests.append(chain(parent, tokens[first : first + size]))
        return self.digests

    def release(self, trusted: bool = True) -> None:
        """Give all blocks back, the last first: of a chain that is cached, its end is evicted before its beginning, without
        which it could not be found. If the content is not `trusted`, nobody will find it."""
        for block in reversed(self.blocks):
            if not trusted:
                self.pool.forget(block)
            self.pool.give_back(block)
        self.blocks.clear()
