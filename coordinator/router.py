"""Which replica a request goes to: the one with the longest part of its prompt, else the least loaded."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

_BLOCK_TOKENS = 32
_DIGEST_BYTES = 16


class PrefixRouter:
    """Remembers which prefixes were sent where, by a chain of block hashes.

    Affinity counts only while the replica that has the prefix runs at most `max_imbalance` sessions more than
    the least loaded one. Costs one short hash per block of the prompt.
    """

    def __init__(self, max_blocks: int = 65_536, max_imbalance: int = 8) -> None:
        self._max_blocks = max_blocks
        self._max_imbalance = max_imbalance
        self._replicas_by_block: OrderedDict[bytes, set[str]] = OrderedDict()

    def pick(self, token_ids: Sequence[int], salt: bytes, num_sessions: Mapping[str, int]) -> str:
        """Pick a replica and remember the choice.

        Args:
            token_ids: the prompt.
            salt: the tenant's cache salt; prefixes under different salts are different.
            num_sessions: the candidates' addresses, each with its load; not empty.
        """
        digests = _block_digests(token_ids, salt)
        least = min(num_sessions.values())
        known = self._longest_prefixes(digests)
        best = min(
            num_sessions,
            key=lambda replica: (
                num_sessions[replica] > least + self._max_imbalance,
                -known.get(replica, 0),
                num_sessions[replica],
                replica,
            ),
        )
        self._remember(digests, best)
        return best

    def remember(self, token_ids: Sequence[int], salt: bytes, replica: str) -> None:
        """A replica holds these tokens now, for example those of a session that ended there."""
        self._remember(_block_digests(token_ids, salt), replica)

    def forget(self, replica: str) -> None:
        """The replica lost its cache."""
        for replicas in self._replicas_by_block.values():
            replicas.discard(replica)

    def _longest_prefixes(self, digests: Sequence[bytes]) -> dict[str, int]:
        known: dict[str, int] = {}
        holders: set[str] | None = None
        for index, digest in enumerate(digests):
            here = self._replicas_by_block.get(digest, set())
            holders = here if holders is None else holders & here
            if not holders:
                break
            for replica in holders:
                known[replica] = index + 1
        return known

    def _remember(self, digests: Sequence[bytes], replica: str) -> None:
        for digest in digests:
            self._replicas_by_block.setdefault(digest, set()).add(replica)
            self._replicas_by_block.move_to_end(digest)
        while len(self._replicas_by_block) > self._max_blocks:
            self._replicas_by_block.popitem(last=False)


def _block_digests(token_ids: Sequence[int], salt: bytes) -> list[bytes]:
    digest = blake2b(salt, digest_size=_DIGEST_BYTES).digest()
    digests = []
    for end in range(_BLOCK_TOKENS, len(token_ids) + 1, _BLOCK_TOKENS):
        block = array("Q", token_ids[end - _BLOCK_TOKENS : end]).tobytes()
        digest = blake2b(digest + block, digest_size=_DIGEST_BYTES).digest()
        digests.append(digest)
    return digests
