"""A version with other kernels is rolled out: what docs/upgrades.md says of streams that began with the old ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

import pytest

from specdec.client import Client
from specdec.wire.errors import FailedPrecondition, Unavailable
from tests.support.releases import Build
from tests.support.services.faults import Reading, eventually, held_back, resumed, sampled_request
from tests.support.services.mixed_fleet import MixedFleet

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

NUM_TOKENS = 200
NUM_BEFORE = 20
TARGET_TIMEOUT_S = 5.0
BODY = sampled_request(5, max_tokens=NUM_TOKENS)


async def state_at(fleet: MixedFleet, coordinator: str, target: str) -> tuple[str, str]:
    """What a coordinator says of a target: its state and why."""
    async with Client(fleet.address(coordinator)) as client:
        replicas = (await client.status()).replicas
    return next(((r.state, r.detail) for r in replicas if r.address == fleet.address(target)), ("unknown", ""))


async def until_state(fleet: MixedFleet, coordinator: str, target: str, state: str) -> str:
    found = ("", "")

    async def is_so() -> bool:
        nonlocal found
        found = await state_at(fleet, coordinator, target)
        return found[0] == state

    await eventually(is_so, f"{target} is {state} at {coordinator}, not {found}; {fleet}")
    return found[1]


async def test_streams_end_with_the_last_target_of_their_numerics_unless_mixing_is_allowed(
    alone: MixedFleet, builds: Mapping[str, Build]
) -> None:
    strict = [f"coordinator-strict-{version}" for version in builds]
    mixing = [f"coordinator-mixing-{version}" for version in builds]
    alone.add("target-before", builds["last"])
    for version, build in builds.items():
        alone.add(f"coordinator-strict-{version}", build, target_timeout_s=TARGET_TIMEOUT_S)
        alone.add(f"coordinator-mixing-{version}", build, allow_mixed_numerics=True)
    await alone.start(*alone.builds)
    before = (await alone.identity("target-before")).numerics_id
    for name in (*strict, *mixing):
        await alone.until_ready(name, "target-before")

    async with AsyncExitStack() as stack:
        streams, clients = {}, {}
        for name in (*strict, *mixing):
            clients[name] = await stack.enter_async_context(held_back(alone.address(name)))
            streams[name] = await stack.enter_async_context(Reading(clients[name], BODY))
            await streams[name].until(NUM_BEFORE)

        alone.add("target-after", builds["this"], native="off")
        await alone.start("target-after")
        after = (await alone.identity("target-after")).numerics_id
        assert after != before
        for name in mixing:
            await until_state(alone, name, "target-after", "ready")
        for name in strict:
            detail = await until_state(alone, name, "target-after", "incompatible")
            assert before in detail and after in detail, name

        await alone.stop("target-before")
        for name in mixing:
            completion = await streams[name].rest()
            choice = completion.choices[0].finished
            assert choice is not None
            assert list(choice.numerics_ids) == [before, after], f"{name}; {alone}"
            assert completion.require_finished().numerics_changed, f"{name}; {alone}"
            assert len(completion.choices[0].token_ids) == NUM_TOKENS, f"{name}; {alone}"
        for name in strict:
            with pytest.raises(Unavailable) as lost:
                await streams[name].rest()
            assert lost.value.reason == "TARGET_LOST", f"{name}; {alone}"
            await until_state(alone, name, "target-after", "ready")
            with pytest.raises(FailedPrecondition) as changed:
                await clients[name].complete(resumed(BODY, streams[name].completion))
            assert changed.value.reason == "NUMERICS_CHANGED", f"{name}; {alone}"

        alike = await asyncio.gather(*(clients[name].complete(BODY) for name in (*strict, *mixing)))
    assert all(completion.identity == alike[0].identity for completion in alike), str(alone)
    assert [list(c.choices[0].finished.numerics_ids) for c in alike if c.choices[0].finished] == [[]] * len(alike)
