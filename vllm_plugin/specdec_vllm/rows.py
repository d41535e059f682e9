"""Sessions of rows. vLLM's rows have no ids and move between steps: a session is found by its tokens.

A key of length and last tokens finds candidates; then all tokens are compared, at the speed of memory (microseconds for
eight thousand tokens), so that rows with equal ends are never confused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from specdec_vllm.draft_stream import DraftStream
    from specdec_vllm.offers import Offer

_TAIL = 16
"""Last tokens in a key."""
_LEAST_ROOM = 256
Tokens = np.ndarray[Any, np.dtype[np.int32]]
Key = tuple[int, bytes]


@dataclass(slots=True, eq=False)
class RowSession:
    """A request of vLLM, as the drafts know it."""

    session_id: str
    tokens: Tokens = field(default_factory=lambda: np.empty(_LEAST_ROOM, np.int32))
    """Its tokens, in an array with room for more."""
    num_tokens: int = 0
    home: DraftStream | None = None
    """The draft that has it."""
    epoch: int = 0
    """Number of openings."""
    told: int = 0
    """Tokens that the home knows."""
    told_s: float = 0.0
    """Monotonic time at which it was told the last of them."""
    is_answered: bool = True
    """The home has offered something for all of them."""
    num_offers: int = 0
    """Offers since it was told the last of them."""
    offer: Offer | None = None
    not_before_s: float = 0.0
    """Monotonic time before which it is not opened again: a draft refused it."""
    seen_s: float = 0.0
    num_proposed: int = 0
    """Tokens that were proposed in the last step."""

    def take(self, row: Tokens, num_tokens: int) -> None:
        """Take the tokens that came since the last step."""
        if num_tokens > len(self.tokens):
            grown = np.empty(max(num_tokens, 2 * len(self.tokens)), np.int32)
            grown[: self.num_tokens] = self.tokens[: self.num_tokens]
            self.tokens = grown
        self.tokens[self.num_tokens : num_tokens] = row[self.num_tokens : num_tokens]
        self.num_tokens = num_tokens

    def chain(self, most: int) -> list[int]:
        """The home's likeliest chain below all tokens; empty if there is none yet."""
        offer = self.offer
        if offer is None or offer.start > self.num_tokens:
            return []
        return offer.chain(self.tokens[offer.start : self.num_tokens].tolist(), most) or []

    def leave(self) -> None:
        """Its home is gone, or has dropped it."""
        self.home, self.offer, self.told = None, None, 0


class RowSessions:
    """All sessions by their tokens."""

    def __init__(self, owner_id: str) -> None:
        self._owner_id = owner_id
        self._by_key: dict[Key, list[RowSession]] = {}
        self._all: dict[str, RowSession] = {}
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[RowSession]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def claim(self, row: Tokens, num_before: int) -> RowSession:
        """The session whose tokens are the first `num_before` of a row, or a new one; no other row finds it.

        `keep` makes it findable again.
        """
        candidates = self._by_key.get(_key(row, num_before), ())
        for session in candidates:
            if np.array_equal(session.tokens[:num_before], row[:num_before]):
                self._forget_key(session)
                return session
        session = RowSession(f"{self._owner_id}-{next(self._numbers)}")
        self._all[session.session_id] = session
        return session

    def keep(self, sessions: Iterable[RowSession]) -> None:
        """Make claimed sessions findable by their present tokens."""
        for session in sessions:
            self._by_key.setdefault(_key(session.tokens, session.num_tokens), []).append(session)

    def drop(self, session: RowSession) -> None:
        """Forget a session."""
        if self._all.pop(session.session_id, None) is not None:
            self._forget_key(session)

    def _forget_key(self, session: RowSession) -> None:
        key = _key(session.tokens, session.num_tokens)
        held = [one for one in self._by_key.get(key, ()) if one is not session]
        if held:
            self._by_key[key] = held
        else:
            self._by_key.pop(key, None)


def _key(tokens: Tokens, num_tokens: int) -> Key:
    return num_tokens, tokens[max(0, num_tokens - _TAIL) : num_tokens].tobytes()
