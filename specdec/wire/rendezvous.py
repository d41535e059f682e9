"""Who of many serves a key: rendezvous hashing (Thaler and Ravishankar, 1998), with a bound on load.

Everybody who knows the same names computes the same choice. A name that comes or goes moves only its own keys, evenly
from and to all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

_WORD = 2**64
_ODD = 0x9E3779B97F4A7C15
"""Factor that spreads differences over the upper bits: 2^64 over the golden ratio."""
_MOST_LOAD, _SLACK = 1.25, 8
"""Calls of a seat: at most this factor of the mean, and this number more. Where there are few calls, the same key
stays at its seat; the number is the router's for sessions of replicas (`max_imbalance`)."""


class Seat(Protocol):
    """Somebody who serves keys."""

    @property
    def word(self) -> int:
        """`word` of its name."""

    @property
    def num_running(self) -> int:
        """Calls that it serves now, as far as the caller knows."""


SeatT = TypeVar("SeatT", bound=Seat)


def word(data: bytes) -> int:
    """64 bits of a name or a key."""
    return int.from_bytes(blake2b(data, digest_size=8).digest())


def score(name: int, key: int) -> int:
    """How much a name is preferred for a key, of the words of both."""
    return (name ^ key) * _ODD % _WORD


def by_preference(seats: Sequence[SeatT], key: int) -> list[SeatT]:
    """All seats, for a key: those with room by their scores, then those without."""
    if not seats:
        return []
    most = most_calls(seat.num_running for seat in seats)
    return sorted(seats, key=lambda seat: (seat.num_running >= most, -score(seat.word, key)))


def most_calls(numbers: Iterable[int]) -> float:
    """Calls from which on a seat has no room for one more, by the calls of all seats."""
    counted = list(numbers)
    return _MOST_LOAD * (sum(counted) + 1) / len(counted) + _SLACK
