"""Clients against coordinator and gateway, the coordinator against clients, and anyone against the metrics port."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import Link
from tests.fuzz.fixed_seed import find_nothing
from tests.fuzz.links import client, coordinator, http, metrics

# As many as 10 CPU seconds hold together.
CASES = [(client.LINK, 60), (http.LINK, 150), (coordinator.LINK, 100), (metrics.LINK, 400)]


@pytest.mark.parametrize(("link", "num_cases"), CASES, ids=[link.name for link, _ in CASES])
async def test_whatever_is_sent_gets_a_typed_answer_and_the_next_good_request_the_right_one(
    link: Link, num_cases: int
) -> None:
    await find_nothing(link, num_cases)
