"""A gateway asks the other coordinators at once, and all again if none answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager

import pytest
from structlog.testing import capture_logs

from specdec.client import Client, ClientSettings
from specdec.gateway.upstream.beginning import key_of
from specdec.gateway.upstream.caller import CallerStub
from specdec.gateway.upstream.coordinators import Coordinators
from specdec.service.byte_budget import ByteBudget
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.backoff import Backoff
from specdec.wire.errors import Overloaded, Unavailable
from specdec.wire.rendezvous import by_preference
from tests.support.services.fake_coordinator import TEXT, FakeCoordinator, running_fake_coordinator
from tests.support.services.gateways import gateway

ALWAYS = 1000
REQUEST = api.GenerateRequest(prompt="a")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.gateway.upstream.caller._BETWEEN_ROUNDS", Backoff(0.01, 0.01))


@contextmanager
def calling(*unavailable_times: int) -> Iterator[tuple[CallerStub, list[FakeCoordinator], list[None]]]:
    """A caller of coordinators that do not answer so many calls each, in the order of its preference; failovers."""
    with ExitStack() as stack:
        running = {
            address: fake
            for fake, address in (stack.enter_context(running_fake_coordinator()) for _ in unavailable_times)
        }
        moved: list[None] = []
        coordinators = Coordinators(
            lambda found: Client(found.address, ClientSettings(retries=False)),
            {"": list(running)},
            lambda: moved.append(None),
        )
        preferred = by_preference(coordinators._turns[""].members, key_of(REQUEST, ()))
        fakes = [running[member.found.address] for member in preferred]
        for fake, times in zip(fakes, unavailable_times, strict=True):
            fake.unavailable_times = times
        held = stack.enter_context(ByteBudget(1 << 20, 1 << 20).hold("client"))
        yield coordinators.caller((), held), fakes, moved


async def read(caller: CallerStub) -> str:
    async with aclosing(caller.generate(REQUEST)) as chunks:
        return "".join([chunk.delta.text async for chunk in chunks])


async def test_a_coordinator_that_does_not_answer_is_asked_once_while_there_are_others() -> None:
    with calling(ALWAYS, 0) as (caller, (silent, other), moved):
        assert await read(caller) == TEXT
        assert (len(silent.requests), len(other.requests), len(moved)) == (1, 1, 1)


@pytest.mark.parametrize(("unavailable_times", "num_moves", "num_logged"), [((3,), 0, 1), ((2, 2), 4, 2)])
async def test_all_are_asked_again_while_they_start(
    unavailable_times: tuple[int, ...], num_moves: int, num_logged: int
) -> None:
    with calling(*unavailable_times) as (caller, fakes, moved), capture_logs() as logs:
        assert await read(caller) == TEXT
        assert len(fakes[0].requests) == unavailable_times[0] + 1
    assert len(moved) == num_moves, "a call that stays at its coordinator does not fail over"
    assert [entry["event"] for entry in logs].count("coordinator_failed") == num_logged


async def test_failures_of_one_coordinator_are_one_line_in_a_second_with_the_number_of_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with calling(ALWAYS, 0) as (caller, (silent, _), _), capture_logs() as logs:
        for quiet_s in (600.0, 0.0):
            monkeypatch.setattr("specdec.gateway.upstream.caller._QUIET_S", quiet_s)
            caller._turns.members[0].tell_at_s = caller._turns.members[1].tell_at_s = 0.0
            for _ in range(5):
                for member in caller._turns.members:
                    member.avoid_until_s = 0.0
                assert await read(caller) == TEXT
    assert len(silent.requests) == 10
    lines = [entry for entry in logs if entry["event"] == "coordinator_failed"]
    assert [line["untold"] for line in lines] == [0, 4, 0, 0, 0, 0]


async def test_a_full_coordinator_is_left_for_the_second_and_no_third_is_asked() -> None:
    full = Overloaded("full", retry_after_s=2.5)
    with calling(0, 0, 0) as (caller, fakes, moved):
        fakes[0].refusal = full
        assert await read(caller) == TEXT
        assert [len(fake.requests) for fake in fakes] == [1, 1, 0]
        fakes[1].refusal = full
        with pytest.raises(Overloaded, match="full") as caught:
            await read(caller)
        assert [len(fake.requests) for fake in fakes] == [2, 2, 0]
        assert caught.value.retry_after_s >= 2.5
        assert not moved, "a full coordinator answers"
        fakes[1].unavailable_times = ALWAYS
        with pytest.raises(Overloaded, match="full"):
            await read(caller)
        assert [len(fake.requests) for fake in fakes] == [3, 3, 0]


@pytest.mark.parametrize("reason", ["QUOTA_EXCEEDED", "QUEUE_TIMEOUT", "DEADLINE_UNREACHABLE"])
async def test_what_another_coordinator_would_refuse_or_let_wait_again_is_asked_of_one(reason: str) -> None:
    with calling(0, 0) as (caller, fakes, _):
        fakes[0].refusal = Overloaded("used up", reason=reason)
        with pytest.raises(Overloaded, match="used up"):
            await read(caller)
        assert [len(fake.requests) for fake in fakes] == [1, 0]


async def test_the_rounds_are_bounded() -> None:
    with calling(ALWAYS, ALWAYS) as (caller, fakes, _):
        with pytest.raises(Unavailable, match="starting"):
            await read(caller)
        assert [len(fake.requests) for fake in fakes] == [5, 5]


async def test_a_gateway_leaves_no_retries_to_grpc() -> None:
    with running_fake_coordinator() as (fake, address):
        fake.unavailable_times = ALWAYS
        async with gateway(address) as one, one.http() as http:
            answer = await http.post("/v1/completions", json={"model": "big", "prompt": "a"})
        assert (answer.status_code, len(fake.requests)) == (503, 5)


async def test_a_client_without_retries_calls_once() -> None:
    with running_fake_coordinator() as (fake, address):
        fake.unavailable_times = ALWAYS
        async with Client(address, ClientSettings(retries=False)) as client:
            with pytest.raises(Unavailable):
                await client.complete(api.GenerateRequest(prompt="a"))
        assert len(fake.requests) == 1
