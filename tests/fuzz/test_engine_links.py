"""Coordinators and servicers against the engines of both roles, real ones on tiny models; ranks and nodes."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import Link
from tests.fuzz.fixed_seed import find_nothing
from tests.fuzz.links import direct, engine_frames, nodes, ranks, worker

# As many as 15 CPU seconds hold together, five of which are torch's import.
CASES = [(worker.TARGET, 60), (worker.DRAFT, 40), (engine_frames.LINK, 40), (ranks.LINK, 300)]
CASES += [(nodes.LEADER, 150), (nodes.NODE, 300)]
CASES += [(direct.TO_TARGET, 25), (direct.TO_DRAFT, 25)]


@pytest.mark.parametrize(("link", "num_cases"), CASES, ids=[link.name for link, _ in CASES])
async def test_whatever_is_sent_an_engine_serves_its_other_sessions_to_the_token(link: Link, num_cases: int) -> None:
    await find_nothing(link, num_cases)
