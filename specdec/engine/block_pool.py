"""Reference-counted KV blocks, the prefix cache over them, and copy-on-write.

A block has one state: free (no owner, no content), cached (no owner, but hashed: found again by prefix, evicted when
blocks run out) or used (one or more owners). The pool holds block numbers only, no keys or values.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.engine.errors import KVInvariantError, OutOfBlocks

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Blocks by state; the three add up to the pool."""

    used: int
    cached: int
    free: int


class BlockPool:
    """The physical blocks of one KV cache.

    Guarantee: only blocks without an owner are allocated, and a hashed block keeps its content until it is evicted.
    """

    def __init__(self, num_blocks: int, block_size: int, identity: bytes = b"") -> None:
        """`identity` (weights digest, dtype) is part of every hash, so that different models never match."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks} and block_size {block_size} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._identity = identity
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # blocks without owner; the next to evict is first
        self._by_digest: dict[bytes, int] = {}

    # --- ownership

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones included."""
        return len(self._free) + len(self._cached)

    def stats(self) -> BlockStats:
        """Blocks by state."""
        free, cached = len(self._free), len(self._cached)
        return BlockStats(used=self.num_blocks - free - cached, cached=cached, free=free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks with one owner each; evicts the least recently used cached blocks when free ones run out.

        Raises:
            OutOfBlocks: fewer are free; none is allocated then.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocks(num_blocks, self.num_free)
        blocks = []
        for _ in range(num_blocks):
            block = self._free.pop() if self._free else self._evict()
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block; revives cached ones.

        Raises:
            KVInvariantError: a block is free.
        """
        for block in blocks:
            if self._ref_counts[block] == 0:
                if self._digests[block] is None:
                    raise KVInvariantError(f"block {block} is free and cannot be shared")
                del self._cached[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one owner of each block. The last block is evicted first, so that a prefix outlives its continuations.

        Raises:
            KVInvariantError: a block has no owner.
        """
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise KVInvariantError(f"block {block} is freed without an owner")
            self._ref_counts[block] = count
            if count == 0:
                if self._digests[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block] = None
        return block

    # --- writing

    def is_writable(self, block: int) -> bool:
        """Whether the block may be written: it is unhashed and has one owner."""
        return self._ref_counts[block] == 1 and self._digests[block] is None

    def check_write(self, block: int) -> None:
        """Check that a block may be written.

        Raises:
            KVInvariantError: the block is hashed, or its number of owners is not one.
        """
        if self._ref_counts[block] != 1 or self._digests[block] is not None:
            state = "hashed" if self._digests[block] is not None else f"owned {self._ref_counts[block]} times"
            raise KVInvariantError(f"write to block {block}, which is {state}")

    def num_blocks_to_write(self, block_ids: Sequence[int], first_slot: int, num_slots: int) -> int:
        """Blocks that `ensure_writable` would allocate. Cost: linear in the written blocks, not in the context."""
        if num_slots <= 0:
            return 0
        end = (first_slot + num_slots - 1) // self.block_size + 1
        needed, ref_counts, digests = max(0, end - len(block_ids)), self._ref_counts, self._digests
        for block in block_ids[first_slot // self.block_size : end]:
            if ref_counts[block] != 1 or digests[block] is not None:  # see `is_writable`
                needed += 1
        return needed

    def ensure_writable(self, block_ids: array[int], first_slot: int, num_slots: int) -> list[tuple[int, int]]:
        """Make logical slots ``[first_slot, first_slot + num_slots)`` writable; changes `block_ids` in place.

        Returns: (source, destination) block copies to make before the write: only of a shared first block with slots
        before `first_slot`, as other shared blocks are overwritten.

        Raises:
            OutOfBlocks: not enough are free; `block_ids` is unchanged then.
        """
        needed = self.num_blocks_to_write(block_ids, first_slot, num_slots)
        if needed == 0:
            return []
        fresh = iter(self.allocate(needed))
        copies = []
        end = (first_slot + num_slots - 1) // self.block_size + 1
        for index in range(first_slot // self.block_size, min(end, len(block_ids))):
            shared = block_ids[index]
            if self.is_writable(shared):
                continue
            block_ids[index] = private = next(fresh)
            if index * self.block_size < first_slot:
                copies.append((shared, private))
            self.free([shared])
        block_ids.extend(fresh)
        return copies

    # --- prefix cache

    def extend_digests(self, digests: list[bytes], token_ids: Sequence[int], salt: bytes, num_blocks: int) -> None:
        """Extend a sequence's hash chain in place to `num_blocks` full blocks.

        A digest covers the parent block's digest, the block's tokens, the model's identity and the salt
        (blake2b, 128 bits).
        """
        while len(digests) < num_blocks:
            start = len(digests) * self.block_size
            parent = digests[-1] if digests else self._root_digest(salt)
            tokens = array("q", token_ids[start : start + self.block_size])
            digests.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=DIGEST_BYTES).digest())

    def lookup(
        self,
        token_ids: Sequence[int],
        salt: bytes = b"",
        digests: list[bytes] | None = None,
        max_blocks: int | None = None,
    ) -> list[int]:
        """Blocks of the longest cached prefix of full blocks. They gain no owner: `share` them at once.

        `digests`: the sequence's hash chain, which the search extends.
        """
        chain = [] if digests is None else digests
        blocks: list[int] = []
        num_full = len(token_ids) // self.block_size
        for index in range(num_full if max_blocks is None else min(num_full, max_blocks)):
            self.extend_digests(chain, token_ids, salt, index + 1)
            block = self.find(chain[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, digest: bytes) -> int | None:
        """The block with this hash, if any. It gains no owner."""
        return self._by_digest.get(digest)

    def register(self, block: int, digest: bytes) -> bool:
        """Hash a used block, whose slots must all be final. Returns False if an equal block is hashed already.

        Raises:
            KVInvariantError: the block has no owner, or another hash.
        """
        if self._ref_counts[block] == 0:
            raise KVInvariantError(f"block {block} is hashed without an owner")
        if digest in self._by_digest:
            return self._by_digest[digest] == block
        if self._digests[block] is not None:
            raise KVInvariantError(f"block {block} is hashed twice")
        self._digests[block] = digest
        self._by_digest[digest] = block
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the prefix cache; their owners keep them."""
        for block in blocks:
            if (digest := self._digests[block]) is not None:
                del self._by_digest[digest]
                self._digests[block] = None
                if self._ref_counts[block] == 0:
                    del self._cached[block]
                    self._free.append(block)

    def _root_digest(self, salt: bytes) -> bytes:
        framed = len(self._identity).to_bytes(8, "little") + self._identity + salt
        return hashlib.blake2b(framed, digest_size=DIGEST_BYTES).digest()
