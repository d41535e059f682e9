"""Coordinators whose Redis is slow, hangs, goes away, loses what it held, and comes back: no stream notices."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from specdec.store.interface import JournalRecord, RequestKey
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import (
    RequestExists,
    Unavailable,
)
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.shared_redis import LONG_S, SHORT_LEASE_S, coordinators, journal_has, metric_is
from tests.support.services.coordinator_harness import (
    collect,
    error_of,
    expected_ids,
    finish,
    read_tokens,
    request,
    resumed,
)
from tests.support.services.faults import PATIENCE_S, eventually

pytestmark = pytest.mark.integration


async def test_while_redis_is_away_only_the_coordinator_of_a_request_can_abort_it(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    abort = api.AbortRequest(request_id="mine")
    async with coordinators(target, redis_server) as (one, two):
        call = one.stub.Generate(request(request_id="mine"))
        result = await read_tokens(call, 10)
        redis_server.stop()
        assert not (await two.stub.Abort(abort)).aborted
        assert (await one.stub.Abort(abort)).aborted
        await finish(call, result)
    assert result.ended[0].reason == pb.FINISH_REASON_ABORT


async def test_a_client_that_cancels_while_its_request_is_being_journalled_leaves_its_id_free(
    redis_server: RedisServer,
) -> None:
    target = ScriptedTarget()
    body = request(request_id="mine")
    # Far longer than the test may take: neither a lease that runs out nor a timeout makes it pass.
    async with coordinators(target, redis_server, redis_timeout_s=LONG_S) as (one, _):
        await collect(one.stub.Generate(request()))
        redis_server.pause()
        call = one.stub.Generate(body)
        begun = asyncio.create_task(collect(call))

        async def is_known() -> bool:
            error = one.stub.Generate(body)
            return isinstance(await error_of(error), RequestExists)

        await eventually(is_known, "the request is on its way to the journal")
        cancelled = one.metric("requests_total", outcome="CANCELLED")
        call.cancel()

        async def has_ended() -> bool:
            return one.metric("requests_total", outcome="CANCELLED") > cancelled

        await eventually(has_ended, "the coordinator knows that the client left")
        redis_server.resume()
        with pytest.raises(asyncio.CancelledError):
            await begun
        assert (await collect(one.stub.Generate(body))).ids() == expected_ids(target, 20)


async def test_a_request_that_waits_for_the_journal_when_its_coordinator_drains_is_sent_elsewhere(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ScriptedTarget()
    body = request(request_id="mine")
    async with coordinators(target, redis_server, redis_timeout_s=LONG_S) as (one, _):
        first = await collect(one.stub.Generate(body))
        redis_server.pause()
        store, is_loading = one.service.store, asyncio.Event()
        load = store.load

        async def observed(key: RequestKey) -> JournalRecord | None:
            is_loading.set()
            return await load(key)

        monkeypatch.setattr(store, "load", observed)
        resuming = asyncio.create_task(error_of(one.stub.Generate(resumed(first, body))))
        await is_loading.wait()
        await one.service.drain(0)
        redis_server.resume()
        error = await resuming
    assert isinstance(error, Unavailable)
    assert error.reason == "DRAINING"


async def test_redis_killed_and_restarted_empty_costs_no_stream_a_token(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=60, request_id="mine")
    with capture_logs() as logs:
        async with coordinators(target, redis_server, journal_lease_s=SHORT_LEASE_S) as (one, two):
            call = one.stub.Generate(body)
            result = await read_tokens(call, 10)
            await journal_has(redis_server, "mine", result.ids())
            redis_server.stop()
            target.set_limit(20)
            while len(result.ids()) < 20:
                result.add(await call.read())
            await metric_is(one, "store_up", 0)
            status = await one.stub.GetStatus(api.GetStatusRequest())
            assert len(status.degraded) == 1
            assert status.degraded[0].startswith("Redis does not answer")
            newcomer = one.stub.Generate(request(max_tokens=60, request_id="new"))
            new = await read_tokens(newcomer, 20)
            assert isinstance(await error_of(one.stub.Generate(body)), RequestExists)
            assert one.metric("requests_unjournalled") >= 1
            assert one.metric("journal_errors_total") >= 1

            redis_server.start()
            await journal_has(redis_server, "mine", expected_ids(target, 20))
            await journal_has(redis_server, "new", expected_ids(target, 20))
            await metric_is(one, "requests_unjournalled", 0)
            await metric_is(one, "store_up", 1)
            await metric_is(two, "store_up", 1)
            assert isinstance(await error_of(two.stub.Generate(body)), RequestExists)
            assert not (await one.stub.GetStatus(api.GetStatusRequest())).degraded
            target.set_limit(None)
            await finish(call, result)
            await finish(newcomer, new)
            await journal_has(redis_server, "mine", expected_ids(target, 60))
    assert result.ids() == new.ids() == expected_ids(target, 60)
    assert {"store_down", "store_up"} <= {entry["event"] for entry in logs}
    assert one.metric("journal_seconds_count") > 0


async def test_a_redis_that_fails_over_to_what_was_there_before_takes_no_request_from_its_owner(
    redis_server: RedisServer,
) -> None:
    target = ScriptedTarget()
    body = request(request_id="mine")
    head = "specdec:v1:{t.}:request:mine"
    async with coordinators(target, redis_server) as (one, two):
        await collect(one.stub.Generate(body))
        with redis_server.client() as client:
            before = client.dump(head)
            target.set_limit(10)
            call = two.stub.Generate(body)
            result = await read_tokens(call, 10)
            await journal_has(redis_server, "mine", result.ids())
            client.restore(head, 600_000, before, replace=True)
        target.set_limit(15)
        await journal_has(redis_server, "mine", expected_ids(target, 15))
        assert isinstance(await error_of(one.stub.Generate(body)), RequestExists)
        target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(target, 20)


async def test_tokens_that_redis_evicted_are_written_again(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with coordinators(target, redis_server) as (one, _):
        call = one.stub.Generate(request(request_id="mine"))
        result = await read_tokens(call, 10)
        await journal_has(redis_server, "mine", result.ids())
        with redis_server.client() as client:
            assert client.delete("specdec:v1:{t.}:request:mine:tokens:0") == 1
        target.set_limit(15)
        await journal_has(redis_server, "mine", expected_ids(target, 15))
        call.cancel()


async def test_no_token_waits_for_a_redis_that_hangs(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    # Far longer than the test may take: a token that waits for Redis fails it.
    async with coordinators(target, redis_server, redis_timeout_s=LONG_S) as (one, _):
        call = one.stub.Generate(request(max_tokens=60))
        result = await read_tokens(call, 10)
        redis_server.pause()
        target.set_limit(None)
        async with asyncio.timeout(PATIENCE_S):
            while result.finished is None:
                result.add(await call.read())
        redis_server.resume()
        await finish(call, result)
    assert result.ids() == expected_ids(target, 60)


async def test_a_redis_that_hangs_holds_up_a_new_request_for_no_longer_than_its_timeout(
    redis_server: RedisServer,
) -> None:
    target = ScriptedTarget()
    async with coordinators(target, redis_server, journal_lease_s=SHORT_LEASE_S, redis_timeout_s=0.2) as (one, _):
        await collect(one.stub.Generate(request()))
        redis_server.pause()
        for _ in range(5):
            assert (await collect(one.stub.Generate(request()))).ids() == expected_ids(target, 20)
        assert one.metric("store_up") == 0
        redis_server.resume()
        await metric_is(one, "store_up", 1)


async def test_a_coordinator_that_starts_without_redis_joins_it_later(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    redis_server.stop()
    body = request(request_id="mine")
    async with coordinators(target, redis_server, journal_lease_s=SHORT_LEASE_S) as (one, two):
        await metric_is(one, "store_up", 0)
        call = one.stub.Generate(body)
        result = await read_tokens(call, 10)
        redis_server.start()
        await journal_has(redis_server, "mine", result.ids())
        await metric_is(two, "store_up", 1)
        assert isinstance(await error_of(two.stub.Generate(body)), RequestExists)
        target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(target, 20)
