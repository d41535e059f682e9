"""The replicas that a coordinator of many is attached to.

Each replica picks its coordinators, by rendezvous hashing over the coordinators of the registry, and every coordinator
computes all picks alike. So replicas have equal numbers of coordinators, but for one, none is left out, and who comes
or goes moves only its own links.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from specdec.wire.rendezvous import score, word

_LEAST_COORDINATORS = 2
"""Coordinators of a replica, at least: one may be lost."""
_REMEMBERED_S = 30.0
"""Seconds for which a coordinator counts after it was last seen: a Redis that was emptied names nobody for a while, and
nobody must attach to the whole fleet in that time."""
_WORD = 2**64


class Subset:
    """The picks of one role's replicas."""

    def __init__(self, size: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`size`: replicas of a coordinator, on average over all of them; None: all. `clock`: monotonic seconds."""
        self._size = size
        self._clock = clock
        self._seen_s: dict[str, float] = {}
        self._names: tuple[str, frozenset[str]] = ("", frozenset())
        self._words: list[int] = []
        """Of the other coordinators."""
        self._ranks: dict[str, tuple[int, float]] = {}
        """By replica: the other coordinators that it prefers to this one, and the fraction that rounds its number."""

    def chosen(self, own: str, coordinators: Collection[str], replicas: Sequence[str]) -> Sequence[str]:
        """The replicas that this coordinator is attached to, in their order.

        All of them, if they are at most `size`, or this coordinator has no name or knows no others.

        Args:
            own: this coordinator's name, as others know it; empty: it has none.
            coordinators: names of the coordinators that are known now, with or without `own`.
            replicas: names of the replicas.
        """
        others = self._others(own, coordinators)
        if self._size is None or len(replicas) <= self._size or not own or not others:
            return replicas
        self._note(own, others, replicas)
        each = self._size * (1 + len(others)) / len(replicas)
        return [name for name in replicas if self._is_mine(name, each)]

    def _others(self, own: str, coordinators: Collection[str]) -> frozenset[str]:
        now_s = self._clock()
        self._seen_s.update(dict.fromkeys(coordinators, now_s))
        self._seen_s = {name: at for name, at in self._seen_s.items() if now_s - at < _REMEMBERED_S and name != own}
        return frozenset(self._seen_s)

    def _note(self, own: str, others: frozenset[str], replicas: Sequence[str]) -> None:
        """Rank this coordinator at new replicas, or at all of them if the coordinators have changed."""
        if self._names != (own, others):
            self._names, self._words, self._ranks = (own, others), [_word(name) for name in others], {}
        mine = _word(own)
        before, self._ranks = self._ranks, {}
        for name in replicas:
            self._ranks[name] = before[name] if name in before else self._rank(mine, _word(name))

    def _rank(self, mine: int, replica: int) -> tuple[int, float]:
        least = score(mine, replica)
        return sum(score(other, replica) > least for other in self._words), replica / _WORD

    def _is_mine(self, name: str, each: float) -> bool:
        """`each`: coordinators of a replica on average; one has the next lower or higher whole number of them."""
        rank, part = self._ranks[name]
        return rank < max(_LEAST_COORDINATORS, int(each + part))


def _word(name: str) -> int:
    return word(name.encode(errors="surrogatepass"))
