"""The processes of an engine of two ranks."""

from __future__ import annotations

import psutil

from tests.support.services.faults import eventually


def ranks_of(engine: psutil.Process) -> list[psutil.Process]:
    """Processes of an engine's ranks above 0."""
    return [child for child in engine.children() if "specdec.replica.ranks.rank_child" in child.cmdline()]


def rank_of(engine: psutil.Process) -> psutil.Process:
    """The one process of an engine's ranks above 0."""
    (rank,) = ranks_of(engine)
    return rank


async def all_gone(*processes: psutil.Process) -> None:
    """Wait until none of the processes runs."""

    async def is_so() -> bool:
        return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)

    await eventually(is_so, f"the end of {[p.pid for p in processes]}")
