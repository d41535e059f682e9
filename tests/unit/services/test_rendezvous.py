"""Keys over seats: evenly, with least movement, and bounded where many calls have one key."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from specdec.wire.rendezvous import by_preference, most_calls, word


@dataclass
class One:
    name: str
    word: int
    num_running: int = 0


def seats(num: int) -> list[One]:
    names = [f"10.0.{number // 250}.{number % 250}:50051" for number in range(num)]
    return [One(name, word(name.encode())) for name in names]


def first(among: list[One], num_keys: int) -> list[str]:
    return [by_preference(among, word(b"chat %d" % key))[0].name for key in range(num_keys)]


@pytest.mark.parametrize("num", [2, 3, 10, 100])
def test_keys_are_spread_evenly(num: int) -> None:
    """Chi-squared with a normal bound of five standard deviations."""
    num_keys = 2000
    found = Counter(first(seats(num), num_keys))
    counts = np.array([found[seat.name] for seat in seats(num)])
    mean = num_keys / num
    squared = float(((counts - mean) ** 2 / mean).sum())
    assert squared < (num - 1) + 5 * math.sqrt(2 * (num - 1))


@pytest.mark.parametrize("gone", [0, 4, 9])
def test_who_leaves_or_comes_moves_its_own_keys_only_and_evenly(gone: int) -> None:
    every = seats(10)
    left = [seat for seat in every if seat is not every[gone]]
    before, after = first(every, 4000), first(left, 4000)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert all(old == every[gone].name for old, new in zip(before, after, strict=True) if old != new)
    assert len(moved) == before.count(every[gone].name)
    mean = len(moved) / 9
    squared = sum((moved.count(seat.name) - mean) ** 2 / mean for seat in left)
    assert squared < 8 + 5 * math.sqrt(16)


def test_the_order_of_the_list_says_nothing() -> None:
    every = seats(20)
    assert first(every, 200) == first(every[::-1], 200)


@pytest.mark.parametrize("num_calls", [5, 100, 5000])
def test_calls_of_one_key_load_no_seat_beyond_the_bound(num_calls: int) -> None:
    every, key = seats(20), word(b"one question for all")
    for _ in range(num_calls):
        by_preference(every, key)[0].num_running += 1
    loads = sorted(seat.num_running for seat in every)
    assert loads[-1] < most_calls(loads) + 1 and sum(loads) == num_calls
    if num_calls == 5:
        assert loads[-1] == 5, "few calls stay together"
    else:
        assert loads[-1] < num_calls / 20 * 1.25 + 10


def test_a_full_seats_keys_go_to_their_second_choice_and_return() -> None:
    every, key = seats(5), word(b"chat")
    preferred = by_preference(every, key)
    preferred[0].num_running = 100
    assert by_preference(every, key) == [*preferred[1:], preferred[0]]
    preferred[0].num_running = 0
    assert by_preference(every, key) == preferred


def test_nobody_is_preferred_among_nobody() -> None:
    assert by_preference(list[One](), 1) == []
