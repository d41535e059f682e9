"""Every link for a minute, from a random seed: what `make test-all` is too short for."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import Link
from tests.fuzz.every_link import ALL
from tests.fuzz.fixed_seed import find_nothing_for

SECONDS = 60.0


@pytest.mark.long
@pytest.mark.parametrize("link", ALL.values(), ids=ALL)
async def test_a_minute_of_cases_from_a_random_seed_finds_nothing(link: Link) -> None:
    await find_nothing_for(link, SECONDS)
