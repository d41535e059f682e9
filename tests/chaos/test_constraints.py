"""Whoever dies in the middle of a stream with a constraint: the rest is what it would have been, and obeys."""

from __future__ import annotations

import re

import pytest

from specdec.commands.up.cluster import Cluster
from tests.support.services.faults import Reading, held_back, make_request, start_again

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LINE = r"item [a-z]{3,6}: [0-9]{1,3}\n"
BEFORE = 20


@pytest.mark.parametrize(
    "killed",
    [("target",), *(pytest.param(names, marks=pytest.mark.long) for names in [("draft",), ("target", "draft")])],
    ids="-".join,
)
async def test_a_constraint_holds_past_the_death_of_a_replica(killed: tuple[str, ...], whole: Cluster) -> None:
    body = make_request(max_tokens=150, temperature=1.0)
    body.sampling.constraint.regex = f"({LINE}){{12}}"
    async with held_back(whole.address) as client:
        undisturbed = await client.complete(body)
        async with Reading(client, body) as stream:
            await stream.until(BEFORE)
            for name in killed:
                whole.kill(name)
            start_again(whole, *killed)
            completion = await stream.rest()
    assert completion.identity == undisturbed.identity
    text = completion.choices[0].text
    assert re.fullmatch(f"({LINE}){{12}}", text) or re.match(f"({LINE}){{3}}", text)
