"""Crowds that fail or are refused at once, with coordinators and targets as processes: they return apart.

    .venv/bin/pytest -s -m long tests/integration/test_storms.py    logs the arrivals

Each test has its counter-proof: the same crowd whose waits are not spread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import structlog

from specdec.client import Client, ClientSettings
from specdec.commands.up.service_process import ServiceProcess
from specdec.gateway.upstream.caller import CallerStub
from specdec.gateway.upstream.coordinators import Coordinators
from specdec.service.byte_budget import ByteBudget
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.discovery import ReplicaAddress
from specdec.wire.errors import Overloaded
from tests.support.scripted.target import ScriptedTarget
from tests.support.scripted.target_process import TargetProcess, target_process
from tests.support.servers.redis_server import RedisServer
from tests.support.services.coordinator_harness import expected_ids
from tests.support.services.faults import eventually
from tests.support.services.one_service import running

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(400)]

NUM_STREAMS, NUM_TOKENS, STEP_S = 200, 60, 0.4
NUM_BEFORE = 2
"""Tokens that each stream has when half of the targets and a coordinator are killed."""
FIRST_WAITS_S = 2.0
"""Seconds over which lost streams draw their first waits."""
NUM_CALLERS, NUM_PLACES, NUM_SHORT = 300, 20, 10
BIN_S = 0.1
_log = structlog.get_logger(__name__)


@dataclass
class Fleet:
    """Processes, and the calls that come to the coordinators."""

    targets: list[TargetProcess]
    coordinators: list[ServiceProcess]
    caller: CallerStub
    calls: list[tuple[float, str]] = field(default_factory=list)
    """Monotonic time, and the coordinator's address."""


class CountedClient(Client):
    """Notes its calls."""

    def __init__(self, address: str, calls: list[tuple[float, str]]) -> None:
        super().__init__(address, ClientSettings(retries=False))
        self._calls = calls

    async def generate(self, request: api.GenerateRequest) -> AsyncGenerator[api.GenerateResponse, None]:
        self._calls.append((time.monotonic(), self.address))
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


@asynccontextmanager
async def fleet(folder: Path, num_targets: int, num_coordinators: int, **settings: object) -> AsyncIterator[Fleet]:
    """Targets, and coordinators of all of them that share a Redis."""
    async with AsyncExitStack() as stack:
        (folder / "redis").mkdir(parents=True)
        redis = stack.enter_context(RedisServer(folder / "redis"))
        targets = [stack.enter_context(target_process(STEP_S)) for _ in range(num_targets)]
        shared: dict[str, object] = {
            "targets": [target.address for target in targets], "redis_url": redis.url, "redis_timeout_s": 20.0,
            "resume_secret": "a secret that all share", "max_running": 1000, "max_waiting": 1000, **settings,
        }  # fmt: skip
        found = []
        for number in range(num_coordinators):
            (own := folder / f"coordinator-{number}").mkdir()
            found.append(
                await stack.enter_async_context(running("coordinator", {**shared, "owner_id": f"c{number}"}, own))
            )
        calls: list[tuple[float, str]] = []

        def connect(address: ReplicaAddress) -> Client:
            return CountedClient(address.address, calls)

        coordinators = Coordinators(connect, {"": [each.spec.address for each in found]}, lambda: None)
        stack.push_async_callback(coordinators.close)
        for member in coordinators._members():
            await eventually(member.client.is_serving, "the coordinator serves")
        held = stack.enter_context(ByteBudget(1 << 30, 1 << 30).hold("client"))
        yield Fleet(targets, found, coordinators.caller((), held), calls)


def request(number: int, num_tokens: int) -> api.GenerateRequest:
    body = api.GenerateRequest(prompt_token_ids=api.TokenIds(token_ids=[5, 6, 7 + number % 50]))
    body.sampling.MergeFrom(api.SamplingParams(seed=number, max_tokens=num_tokens, ignore_eos=True))
    return body


def expected(number: int, num_tokens: int) -> list[int]:
    return expected_ids(ScriptedTarget(), num_tokens, [5, 6, 7 + number % 50], seed=number)


def per_bin(times_s: list[float], seconds: float) -> np.ndarray:
    """Arrivals in each tenth of a second."""
    return np.histogram(times_s, round(seconds / BIN_S), (0.0, seconds))[0]


async def half_lost(folder: Path) -> np.ndarray:
    """Lose half of the targets and a coordinator in mid-stream; the calls in the ten seconds that follow."""
    async with fleet(folder, 4, 2) as one:
        ids: list[list[int]] = [[] for _ in range(NUM_STREAMS)]

        async def read(number: int) -> None:
            async with aclosing(one.caller.stream(request(number, NUM_TOKENS))) as chunks:
                async for chunk in chunks:
                    ids[number] += [token.id for token in chunk.delta.tokens]

        reading = [asyncio.create_task(read(number)) for number in range(NUM_STREAMS)]

        async def have_begun() -> bool:
            return all(len(own) >= NUM_BEFORE for own in ids) or any(task.done() for task in reading)

        await eventually(have_begun, "all streams have begun")
        assert all(len(own) < NUM_TOKENS for own in ids)
        lost = [address for _, address in one.calls].count(one.coordinators[0].spec.address)
        assert NUM_STREAMS / 4 < lost < NUM_STREAMS * 3 / 4
        one.calls.clear()
        lost_s = time.monotonic()
        for process in (*one.targets[:2], one.coordinators[0]):
            process.kill()
        await asyncio.gather(*reading)
        for number, own in enumerate(ids):
            assert own == expected(number, NUM_TOKENS), number
        assert len(one.calls) >= lost
        return per_bin([at_s - lost_s for at_s, _ in one.calls], 10.0)


async def test_streams_of_a_lost_coordinator_return_evenly_when_half_of_the_targets_are_lost_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = await half_lost(tmp_path / "spread")
    monkeypatch.setattr("specdec.client.resuming.FIRST_SPREAD", (1.0, 1.0))
    together = await half_lost(tmp_path / "together")
    peaks = [float(each.max() / (each.sum() * BIN_S / FIRST_WAITS_S)) for each in (spread, together)]
    _log.info("lost", peak=peaks[0], peak_unspread=peaks[1], spread=spread[:30], unspread=together[:30])
    assert peaks[0] < 4 and peaks[1] > 2 * peaks[0]
    late = spread[round(2 * FIRST_WAITS_S / BIN_S) :]
    assert late.sum() <= 0.1 * spread.sum(), "no second storm"


async def crowd(folder: Path, *, is_spread: bool) -> tuple[np.ndarray, int]:
    """Callers beyond all places, who keep to the waits that they are told, and give up after two more tries, as
    OpenAI's clients do; their second calls, and how many were served."""
    async with fleet(folder, 1, 1, max_running=NUM_PLACES, max_waiting=NUM_PLACES) as one:
        second_s: list[float] = []
        told_s: list[float] = []
        begin_s = time.monotonic()

        async def call(number: int) -> bool:
            for attempt in range(3):
                if attempt == 1:
                    second_s.append(time.monotonic() - begin_s)
                ids: list[int] = []
                try:
                    async with aclosing(one.caller.generate(request(number, NUM_SHORT))) as chunks:
                        async for chunk in chunks:
                            ids += [token.id for token in chunk.delta.tokens]
                except Overloaded as error:
                    told_s.append(error.retry_after_s)
                    await asyncio.sleep(error.retry_after_s if is_spread else min(told_s))
                    continue
                assert ids == expected(number, NUM_SHORT)
                return True
            return False

        served = await asyncio.gather(*(call(number) for number in range(NUM_CALLERS)))
        assert len(second_s) > NUM_CALLERS / 4
        return per_bin(second_s, 20.0), sum(served)


async def test_callers_who_were_refused_together_return_apart(tmp_path: Path) -> None:
    spread, num_spread = await crowd(tmp_path / "spread", is_spread=True)
    together, num_together = await crowd(tmp_path / "together", is_spread=False)
    _log.info("refused", served=num_spread, unspread=num_together, spread=spread[:60], together=together[:60])
    assert 1.5 * spread.max() < together.max()
    assert num_spread >= num_together
