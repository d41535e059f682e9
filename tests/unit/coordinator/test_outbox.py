"""What waits for a replica is bounded, in entries and in bytes, and leaves in frames that are."""

from __future__ import annotations

import pytest

from specdec.coordinator.links.outbox import Outbox
from specdec.v1 import target_pb2

MIB = 2**20


def an_entry(num_bytes: int) -> target_pb2.TargetEntry:
    return target_pb2.TargetEntry(session_id="s", proposal=bytes(num_bytes))


async def test_bytes_are_bounded_though_the_entries_are_few() -> None:
    outbox: Outbox[target_pb2.TargetEntry] = Outbox()
    big = an_entry(60 * MIB)
    assert [outbox.put(big) for _ in range(5)] == [True, True, True, True, False]
    outbox.clear()
    assert outbox.put(big)


async def test_what_was_taken_makes_room() -> None:
    outbox: Outbox[target_pb2.TargetEntry] = Outbox()
    big = an_entry(60 * MIB)
    for _ in range(20):
        assert outbox.put(big)
        assert await outbox.take() == [big]


@pytest.mark.parametrize(("sizes", "frames"), [([1, 1, 1], [3]), ([3, 3, 3], [1, 1, 1]), ([9, 1, 1, 1], [1, 3])])
async def test_frames_are_bounded_unless_one_entry_alone_is_larger(sizes: list[int], frames: list[int]) -> None:
    outbox: Outbox[target_pb2.TargetEntry] = Outbox()
    for size in sizes:
        outbox.put(an_entry(size * MIB))
    assert [len(await outbox.take()) for _ in frames] == frames
