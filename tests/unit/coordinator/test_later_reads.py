"""Streams wait for their next message as long as memory lasts; then the greediest caller's are ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

from specdec.coordinator.intake.reads.later_reads import LaterReads
from specdec.service.memory_limit import is_short
from specdec.wire.errors import Overloaded
from tests.support.services.faults import eventually


async def test_when_memory_is_short_the_reads_that_do_not_fit_are_cut_off_the_greediest_callers_first() -> None:
    short, never = False, asyncio.Event()
    reads = LaterReads(num_fitting=5, is_short=lambda: short)

    async def read(caller: str) -> str:
        try:
            async with reads.reading(caller):
                await never.wait()
        except Overloaded as error:
            return error.reason
        return "read"

    polite = [asyncio.create_task(read(f"polite {index % 2}")) for index in range(4)]
    greedy = [asyncio.create_task(read("greedy")) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in (*polite, *greedy))
    short = True

    async def are_cut_off() -> bool:
        return sum(task.done() for task in greedy) >= 19

    await eventually(are_cut_off, "nineteen reads are cut off")
    never.set()
    assert await asyncio.gather(*polite) == ["read"] * 4
    assert sorted(await asyncio.gather(*greedy)) == ["TOO_MANY_UNREAD"] * 19 + ["read"]
    assert reads._watching is None or await reads._watching is None


def test_memory_is_short_above_its_share_of_the_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000000")
    (tmp_path / "cgroup").write_text("0::/\n")
    for resident_pages, expected in ((1000, False), (230_000, True)):
        (tmp_path / "statm").write_text(f"9 {resident_pages} 1")
        assert is_short(root=tmp_path, proc=tmp_path) is expected
