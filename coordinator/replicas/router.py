"""Choose a replica for a request: the one that caches most of its prompt, otherwise the least loaded."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Protocol, TypeVar

from specdec.coordinator.replicas.load import LoadedLink, weight, with_room
from specdec.coordinator.replicas.prefix_map import SharedPrefixes
from specdec.coordinator.tasks import LONG_TOKENS, in_parts, pieces

BLOCK_TOKENS = 32
"""Tokens per hashed block: twice the length of a replica's block, for half the digests."""
_DIGEST_BYTES = 16
"""Bytes of a digest: chance collisions are negligible."""


class RoutedLink(LoadedLink, Protocol):
    """A link to a replica that caches prefixes."""

    @property
    def holder(self) -> str:
        """Name of the process that holds the cache."""


Link = TypeVar("Link", bound=RoutedLink)


class PrefixRouter:
    """Remembers which replica caches which prefix, by a chain of block hashes.

    Affinity counts only while the replica with the prefix runs at most `max_imbalance` sessions more than the least
    loaded one. Cost: one short hash per block of the prompt, 5 ms for 100,000 tokens.

    The caller names the replicas; a replica that has lost its cache needs a new name, or `forget`.
    """

    def __init__(self, max_blocks: int = 65_536, max_imbalance: int = 8, shared: SharedPrefixes | None = None) -> None:
        """Remember at most `max_blocks` blocks; `shared` exchanges them with other coordinators."""
        self._max_blocks = max_blocks
        self._max_imbalance = max_imbalance
        self._shared = shared
        self._replicas_by_block: OrderedDict[bytes, set[str]] = OrderedDict()

    async def ask_others(self, digests: Sequence[bytes], replicas: Sequence[str]) -> Mapping[str, int]:
        """Blocks of a prompt that each replica caches, as other coordinators know.

        The store is asked, which costs a round trip, only if there are several replicas and none is known here to have
        the whole prompt.
        """
        if self._shared is None or len(replicas) < 2 or not digests:
            return {}
        known = self._longest_prefixes(digests)
        if any(known.get(replica) == len(digests) for replica in replicas):
            return {}
        return await self._shared.lengths(digests)

    def pick_link(
        self,
        links: Sequence[Link],
        digests: Sequence[bytes],
        now_s: float,
        known_to_others: Mapping[str, int] | None = None,
    ) -> Link:
        """Pick a link with room, or of all if none has, and remember the choice; `links` is not empty."""
        by_holder = {link.holder: link for link in with_room(links, now_s)}
        loads = {holder: weight(link) for holder, link in by_holder.items()}
        return by_holder[self.pick(digests, loads, known_to_others)]

    def pick(
        self,
        digests: Sequence[bytes],
        num_sessions: Mapping[str, float],
        known_to_others: Mapping[str, int] | None = None,
    ) -> str:
        """Pick a replica and remember the choice.

        Args:
            digests: the prompt's blocks, by `block_digests`.
            num_sessions: load of each candidate, in sessions; not empty.
            known_to_others: from `ask_others`.
        """
        least = min(num_sessions.values())
        known = self._longest_prefixes(digests)
        others = known_to_others or {}
        best = min(
            num_sessions,
            key=lambda replica: (
                num_sessions[replica] > least + self._max_imbalance,
                -max(known.get(replica, 0), others.get(replica, 0)),
                num_sessions[replica],
                replica,
            ),
        )
        self.remember(digests, best)
        return best

    def remember(self, digests: Sequence[bytes], replica: str) -> None:
        """A replica caches these blocks now, for example after a session's end."""
        # The last block, useless without the others, is forgotten first.
        parts = list(pieces(digests, LONG_TOKENS // BLOCK_TOKENS))[::-1]
        in_parts((len(part) * BLOCK_TOKENS, partial(self._remember, part, replica)) for part in parts)
        if self._shared is not None:
            self._shared.add(replica, digests)

    def _remember(self, digests: Sequence[bytes], replica: str) -> None:
        for digest in reversed(digests):
            self._replicas_by_block.setdefault(digest, set()).add(replica)
            self._replicas_by_block.move_to_end(digest)
        while len(self._replicas_by_block) > self._max_blocks:
            self._replicas_by_block.popitem(last=False)

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


def block_digests(token_ids: Sequence[int], salt: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """One digest per full block of a prompt, over all tokens up to the block's end.

    Args:
        token_ids: the prompt.
        salt: the tenant's cache salt; prefixes under different salts are different.
        known: the digests of the first blocks, which are not computed again.
    """
    digest = known[-1] if known else blake2b(salt, digest_size=_DIGEST_BYTES).digest()
    digests = [*known]
    for end in range((1 + len(known)) * BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        block = array("Q", token_ids[end - BLOCK_TOKENS : end]).tobytes()
        digest = blake2b(digest + block, digest_size=_DIGEST_BYTES).digest()
        digests.append(digest)
    return digests
