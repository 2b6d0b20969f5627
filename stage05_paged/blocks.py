"""Blocks: which sequence owns which piece of the cache's memory. Plain Python, no tensors.

The memory for keys and values is allocated once and divided into blocks of equal size. A sequence
has a table of its blocks, in order of position, like a process's page table (Kwon et al.,
"PagedAttention", SOSP 2023). A block may be in several tables, so its references are counted. A
full block is identified by its tokens and all tokens before them, so a sequence with the same
beginning finds it. A block that no table holds any more is kept until its memory is needed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.errors import UserError


@dataclass(frozen=True)
class Move:
    """Memory work before a pass.

    kind: "wipe" fills block `target` with zeros, "copy" copies block `source` to it, "out" copies
        block `source` to block `target` of the swap pool, and "in" copies one back from there.
    """

    kind: str
    source: int
    target: int


class BlockPool:
    """`count` numbered blocks of `block_size` tokens each. All calls but `match` take constant
    time.

    A block is free (unowned, its content is invalid), cached (unowned, and a digest finds it), or
    owned (`references[block]` tables hold it).
    """

    def __init__(self, count: int, block_size: int = 16) -> None:
        if count < 1:
            raise UserError(f"There must be at least 1 block, not {count}: give more memory.")
        if block_size < 1:
            raise UserError(f"A block must hold at least 1 token, not {block_size}.")
        self.count, self.block_size = count, block_size
        self.references = [0] * count
        self.free = list(range(count - 1, -1, -1))  # a stack: last freed, first taken
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.digests: list[bytes | None] = [None] * count  # of each published block
        self.by_digest: dict[bytes, int] = {}  # digest -> block
        self.evictions = 0

    @property
    def available(self) -> int:
        """Number of blocks that `take` can return: free or cached."""
        return len(self.free) + len(self.cached)

    @property
    def owned(self) -> int:
        """Number of blocks that one or more tables hold."""
        return self.count - self.available

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def take(self) -> int:
        """Return a block for one table. If none is free, evict the least recently used cached one.

        Raises RuntimeError if all blocks are owned: check `available` first.
        """
        if self.free:
            block = self.free.pop()
        elif self.cached:
            block, _ = self.cached.popitem(last=False)
            self.unpublish(block)
            self.evictions += 1
        else:
            raise RuntimeError(f"all {self.count} blocks are owned")
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more table that holds `block`, which must be owned or cached."""
        if not self.references[block]:
            if block not in self.cached:
                raise RuntimeError(f"block {block} is free: its content is invalid")
            del self.cached[block]
        self.references[block] += 1

    def give_back(self, block: int) -> None:
        """Count one table fewer. After the last, `block` is cached if published, else free."""
        if not self.references[block]:
            raise RuntimeError(f"block {block} is given back, but no table holds it")
        self.references[block] -= 1
        if not self.references[block]:
            if self.digests[block] is None:
                self.free.append(block)
            else:
                self.cached[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Make `block`, full and owned, findable by `digest`, unless another block already is."""
        if digest not in self.by_digest and self.digests[block] is None:
            self.digests[block], self.by_digest[digest] = digest, block

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks, owned or cached, of the longest known prefix of a chain of digests."""
        blocks = []
        for digest in digests:
            if digest not in self.by_digest:
                break
            blocks.append(self.by_digest[digest])
        return blocks

    def unpublish(self, block: int) -> None:
        """Drop the digest of `block`, so that it no longer matches."""
        digest = self.digests[block]
        if digest is not None:
            del self.by_digest[digest]
            self.digests[block] = None


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full block: SHA-256 over the previous block's digest and its own tokens.

    It identifies everything from position 0 on: equal tokens after a different beginning are a
    different block. The hash is cryptographic because a server matches blocks by it: with a weak
    one, a user could craft colliding prompts, and be answered from another user's context.
    """
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


@dataclass
class BlockTable:
    """The blocks of one sequence: position p is in blocks[p // block_size], at p % block_size.

    digests: of its full blocks, as far as computed; they survive when the blocks are taken away.
    salt: sequences with different salts, such as those of different tenants, never share by digest.
    """

    pool: BlockPool
    salt: bytes = b""
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    @property
    def root(self) -> bytes:
        """The parent of the first digest."""
        return hashlib.sha256(self.salt).digest()

    def grow(self, tokens: int) -> list[int]:
        """Take the blocks that `tokens` tokens still need; returns the new ones."""
        before = len(self.blocks)
        for _ in range(self.missing(tokens)):
            # One by one: if the pool runs out, the blocks taken so far are in the table.
            self.blocks.append(self.pool.take())
        return self.blocks[before:]

    def missing(self, tokens: int) -> int:
        """Number of blocks to take before the table holds `tokens` tokens."""
        return max(0, self.pool.blocks_for(tokens) - len(self.blocks))

    def adopt(self, blocks: Iterable[int]) -> None:
        """Append blocks that matched or that another table holds, and share them."""
        for block in blocks:
            self.pool.share(block)
            self.blocks.append(block)

    def replace(self, position: int) -> tuple[int, int]:
        """Copy-on-write: put a new block in place of the shared one at `position`.

        Returns (old, new): the caller copies the content before it writes.
        """
        index = position // self.pool.block_size
        old, new = self.blocks[index], self.pool.take()
        self.blocks[index] = new
        self.pool.give_back(old)
        return old, new

    def digest(self, tokens: Sequence[int]) -> list[bytes]:
        """Digest the full blocks of `tokens`, the sequence's next tokens. Returns all digests."""
        size = self.pool.block_size
        for first in range(0, len(tokens) - size + 1, size):
            parent = self.digests[-1] if self.digests else self.root
            self.digests.append(chain(parent, tokens[first : first + size]))
        return self.digests

    def release(self, trusted: bool = True) -> None:
        """Give all blocks back, the last first; content that is not `trusted` no longer matches.

        The last first, because the end of a cached chain must be evicted before its beginning:
        without the beginning, no lookup reaches the end.
        """
        for block in reversed(self.blocks):
            if not trusted:
                self.pool.unpublish(block)
            self.pool.give_back(block)
        self.blocks.clear()
