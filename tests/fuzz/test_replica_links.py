"""Targets and drafts that lie to the coordinator once in each case."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import Link
from tests.fuzz.fixed_seed import find_nothing
from tests.fuzz.links import replicas

# As many as 5 CPU seconds hold together; most of their time they wait for what a liar does not say.
CASES = [(replicas.TARGET, 12), (replicas.DRAFT, 12)]


@pytest.mark.parametrize(("link", "num_cases"), CASES, ids=[link.name for link, _ in CASES])
async def test_a_lie_costs_nobody_else_a_token_and_the_next_good_request_is_answered(
    link: Link, num_cases: int
) -> None:
    await find_nothing(link, num_cases)
