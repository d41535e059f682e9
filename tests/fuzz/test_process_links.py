"""What a process of its own says to a service: an engine to its servicer, Redis to a coordinator."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import Link
from tests.fuzz.fixed_seed import find_nothing
from tests.fuzz.links import bridge, store

# As many as 10 CPU seconds hold together.
CASES = [(bridge.LINK, 60), (store.LINK, 60)]


@pytest.mark.integration
@pytest.mark.parametrize(("link", "num_cases"), CASES, ids=[link.name for link, _ in CASES])
async def test_what_makes_no_sense_is_told_apart_and_costs_nobody_else_anything(link: Link, num_cases: int) -> None:
    await find_nothing(link, num_cases)
