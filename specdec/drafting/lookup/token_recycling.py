"""Token recycling (arXiv:2408.08696): a matrix of the target's likeliest tokens after each token, as last seen.

Every verified row tells the target's best eight; the newest replace what was known of the row's token. An offer is the
tree of what follows what, best paths first, by how often each rank was right of late. One matrix for each tenant salt,
of vocabulary times eight ids. A step costs 30 to 60 us, and the target's best eight of every row.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from specdec.config.drafter_options import TokenRecyclingOptions
from specdec.drafting.interface import Capabilities, Context, Offer, Room

NUM_SUCCESSORS = 8
CAPABILITIES = Capabilities(num_target_top=NUM_SUCCESSORS)
_UNKNOWN = -1
_FIRST_SHARES = (0.4, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
"""How often each rank is right, before anything was seen."""
_WEIGHT = 1 / 128
"""Of a new observation."""


class TokenRecycling:
    """Keeps a matrix for each tenant, and how often each rank was right."""

    name = "token_recycling"
    capabilities = CAPABILITIES

    def __init__(self, options: TokenRecyclingOptions, vocab_size: int) -> None:
        self._empty = array("i", [_UNKNOWN]) * (vocab_size * NUM_SUCCESSORS)
        self._most_matrices = max(1, options.max_bytes // (vocab_size * NUM_SUCCESSORS * self._empty.itemsize))
        self._matrices: OrderedDict[bytes, array[int]] = OrderedDict()
        self._shares = list(_FIRST_SHARES)

    def open(self, context: Context) -> TokenRecycling:
        """All sessions of a tenant share a matrix."""
        return self

    def close(self, context: Context) -> None:
        """The matrix stays."""

    def verified(self, context: Context, token_ids: Sequence[int], top_ids: Sequence[Sequence[int]]) -> None:
        """Replace what is known of these tokens; and see which rank would have been right."""
        matrix = self._matrix(context.salt)
        for token, best in zip(token_ids, top_ids, strict=True):
            start = token * NUM_SUCCESSORS
            if matrix[start] != _UNKNOWN:
                known = matrix[start : start + NUM_SUCCESSORS]
                rank = known.index(best[0]) if best[0] in known else NUM_SUCCESSORS
                for each in range(NUM_SUCCESSORS):
                    self._shares[each] += _WEIGHT * ((each == rank) - self._shares[each])
            for offset, successor in enumerate(best[:NUM_SUCCESSORS]):
                matrix[start + offset] = successor

    def propose(self, context: Context, room: Room) -> Offer | None:
        """The likeliest paths through the matrix from the last token."""
        matrix = self._matrix(context.salt)
        offer = Offer([], [], [])
        waiting: list[tuple[float, int, int, int, float, int]] = []
        num_seen = 0
        parent, token, path, depth = -1, context.token_ids[-1], 1.0, 1
        while True:
            start = token * NUM_SUCCESSORS
            if depth <= room.depth:
                for rank, share in enumerate(self._shares):
                    successor = matrix[start + rank]
                    if successor == _UNKNOWN:
                        break
                    num_seen += 1
                    heapq.heappush(waiting, (-path * share, num_seen, parent, successor, share, depth))
            if not waiting or len(offer.token_ids) >= room.num_nodes:
                break
            negated, _, above, token, share, depth = heapq.heappop(waiting)
            parent, path, depth = len(offer.token_ids), -negated, depth + 1
            offer.token_ids.append(token)
            offer.parents.append(above)
            offer.scores.append(max(0.0, share))
        return offer if offer.token_ids else None

    def _matrix(self, salt: bytes) -> array[int]:
        matrix = self._matrices.get(salt)
        if matrix is None:
            matrix = self._matrices[salt] = array("i", self._empty)
            while len(self._matrices) > self._most_matrices:
                self._matrices.popitem(last=False)
        self._matrices.move_to_end(salt)
        return matrix
