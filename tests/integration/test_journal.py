"""Coordinators that share a Redis: ids are unique over them, one takes up what another began, and Redis may fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from specdec.cli.cluster import Cluster, free_port
from specdec.rpc.errors import (
    Cancelled,
    InvalidRequest,
    Overloaded,
    RequestExists,
    SpecdecError,
    Unavailable,
    from_rpc_error,
)
from specdec.store.interface import JournalRecord, RequestKey
from specdec.store.urls import RedisOptions, connect
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from tests.chaos.faults import PATIENCE_S, another, eventually, scrape
from tests.integration.coordinator_harness import Harness, Result, collect, expected_ids, request, running
from tests.integration.redis_server import RedisServer
from tests.integration.scripted_replicas import ScriptedTarget
from tests.integration.test_coordinator_failures import finish, read_tokens, resumed

pytestmark = pytest.mark.integration

SECRET = "a secret that two coordinators share"
# Longer than any test takes.
LONG_S = 600.0
# Renewed every second: so a coordinator that has nothing to write learns what became of Redis, and of its requests.
SHORT_LEASE_S = 3.0
PATIENT = RedisOptions(timeout_s=20.0)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@asynccontextmanager
async def coordinators(
    target: ScriptedTarget, redis_server: RedisServer, **changes: Any
) -> AsyncIterator[tuple[Harness, Harness]]:
    """Two coordinators on one target and one Redis."""
    settings = {"redis_url": redis_server.url, "redis_timeout_s": 20.0, "journal_lease_s": LONG_S, **changes}
    async with (
        running([target], owner_id="one", **settings) as one,
        running([target], owner_id="two", **settings) as two,
    ):
        yield one, two


async def error_of(call: Any) -> SpecdecError:
    """What a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        await collect(call)
    return from_rpc_error(caught.value)


async def journalled(redis_server: RedisServer, request_id: str) -> JournalRecord | None:
    store = connect(redis_server.url, PATIENT)
    try:
        return await store.load(RequestKey("", request_id))
    finally:
        await store.close()


async def journal_has(redis_server: RedisServer, request_id: str, token_ids: list[int]) -> None:
    """Wait until these are a request's tokens in Redis."""

    async def has() -> bool:
        record = await journalled(redis_server, request_id)
        return record is not None and list(record.token_ids[0]) == token_ids

    await eventually(has, f"{len(token_ids)} tokens are in the journal")


async def metric_is(harness: Harness, name: str, value: float) -> None:
    async def is_so() -> bool:
        return harness.metric(name) == value

    await eventually(is_so, f"{name} is {value:g}")


async def test_an_id_that_runs_at_one_coordinator_exists_at_the_other_until_it_ends(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(request_id="mine")
    async with coordinators(target, redis_server) as (one, two):
        call = one.stub.Generate(body)
        first = await read_tokens(call, 10)
        error = await error_of(two.stub.Generate(body))
        assert isinstance(error, RequestExists)
        target.set_limit(None)
        await finish(call, first)
        again = await collect(two.stub.Generate(body))
    assert first.ids() == again.ids() == expected_ids(target, 20)


async def test_an_id_in_the_queue_of_one_coordinator_exists_at_the_other(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with coordinators(target, redis_server, max_running=1) as (one, two):
        running_call = one.stub.Generate(request())
        await read_tokens(running_call, 10)
        waiting = one.stub.Generate(request(request_id="mine"))
        await metric_is(one, "queue_length", 1)
        error = await error_of(two.stub.Generate(request(request_id="mine")))
        assert isinstance(error, RequestExists)
        waiting.cancel()
        await metric_is(one, "queue_length", 0)
        target.set_limit(None)
        assert (await collect(two.stub.Generate(request(request_id="mine")))).ids() == expected_ids(target, 20)


async def test_the_id_of_a_tenant_is_free_for_another_tenant(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(request_id="mine")
    async with coordinators(target, redis_server) as (one, two):
        call = one.stub.Generate(body, metadata=[("specdec-tenant", "a")])
        first = await read_tokens(call, 10)
        target.set_limit(None)
        other = await collect(two.stub.Generate(body, metadata=[("specdec-tenant", "b")]))
        await finish(call, first)
    assert first.ids() == other.ids()


async def test_a_resume_at_another_coordinator_ends_the_stream_that_is_still_live(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=60, request_id="mine")
    async with coordinators(target, redis_server, journal_lease_s=SHORT_LEASE_S) as (one, two):
        old = one.stub.Generate(body)
        first = await read_tokens(old, 10)
        new = two.stub.Generate(resumed(first, body))
        error = await error_of(old)
        assert isinstance(error, Cancelled)
        assert error.reason == "TAKEN_OVER"
        target.set_limit(None)
        rest = await collect(new)
        await journal_has(redis_server, "mine", expected_ids(target, 60))
    assert first.ids() + rest.ids() == expected_ids(target, 60)


async def test_what_a_client_lost_comes_from_the_journal_of_a_coordinator_that_drained(
    redis_server: RedisServer,
) -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=60, n=2)
    async with coordinators(target, redis_server) as (one, two):
        old = one.stub.Generate(body)
        first = await read_tokens(old, 10)
        while len(first.ids(1)) < 10:
            first.add(await old.read())
        await one.service.drain(0)
        error = await error_of(old)
        assert isinstance(error, Unavailable)
        target.set_limit(None)
        first.tokens, first.texts = {}, {}
        rest = await collect(two.stub.Generate(resumed(first, body)))
    for choice in range(2):
        assert rest.ids(choice) == expected_ids(target, 60, choice=choice)
    assert [num for _, _, num in target.opened] == [3, 3, 13, 13]


async def test_a_request_can_be_aborted_at_any_coordinator_by_its_tenant(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(request_id="mine", n=2)
    async with coordinators(target, redis_server, journal_lease_s=SHORT_LEASE_S) as (one, two):
        call = one.stub.Generate(body)
        result = await read_tokens(call, 10)
        abort = api.AbortRequest(request_id="mine")
        assert not (await two.stub.Abort(abort, metadata=[("specdec-tenant", "other")])).aborted
        assert not (await two.stub.Abort(api.AbortRequest(request_id="other"))).aborted
        assert (await two.stub.Abort(abort)).aborted
        await finish(call, result)
        await target.until(lambda: not target.sessions)
        assert not (await two.stub.Abort(abort)).aborted
        target.set_limit(None)
        again = await collect(two.stub.Generate(body))
    assert {choice: ended.reason for choice, ended in result.ended.items()} == dict.fromkeys(
        range(2), pb.FINISH_REASON_ABORT
    )
    assert result.ids() == expected_ids(target, 10)
    assert again.ids() == expected_ids(target, 20)


async def test_a_request_in_the_queue_of_one_coordinator_can_be_aborted_at_the_other(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with coordinators(target, redis_server, journal_lease_s=SHORT_LEASE_S, max_running=1) as (one, two):
        running_call = one.stub.Generate(request())
        await read_tokens(running_call, 10)
        waiting = one.stub.Generate(request(request_id="mine"))
        await metric_is(one, "queue_length", 1)
        assert (await two.stub.Abort(api.AbortRequest(request_id="mine"))).aborted
        result = await collect(waiting)
        running_call.cancel()
    assert result.chunks == ["started", "choice_finished", "finished"]
    assert result.ended[0].reason == pb.FINISH_REASON_ABORT


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


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt_token_ids", {"prompt_ids": (5, 6, 8)}),
        ("sampling.temperature", {"temperature": 0.5}),
        ("sampling.max_tokens", {"max_tokens": 30}),
        ("sampling.stop", {"stop": ["x"]}),
        ("sampling.logit_bias", {"logit_bias": {7: 1.0}}),
        ("speculation.verify_mode", {"speculation": api.SpeculationParams(verify_mode="VERIFY_MODE_REJECTION")}),
    ],
)
async def test_a_resume_with_other_parameters_is_refused_and_the_stream_goes_on(
    redis_server: RedisServer, field: str, change: dict[str, Any]
) -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=20, request_id="mine")
    async with coordinators(target, redis_server) as (one, two):
        call = one.stub.Generate(body)
        first = await read_tokens(call, 10)
        other = request(**{"max_tokens": 20, "request_id": "mine", **change})
        error = await error_of(two.stub.Generate(resumed(first, other)))
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.reason) == (field, "RESUME_DIFFERS")
        target.set_limit(None)
        await finish(call, first)
    assert first.ids() == expected_ids(target, 20)


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
            assert isinstance(await error_of(two.stub.Generate(body)), RequestExists)
            assert not (await one.stub.GetStatus(api.GetStatusRequest())).degraded
            target.set_limit(None)
            await finish(call, result)
            await finish(newcomer, new)
            await journal_has(redis_server, "mine", expected_ids(target, 60))
    assert result.ids() == new.ids() == expected_ids(target, 60)
    assert {"store_down", "store_up"} <= {entry["event"] for entry in logs}
    assert one.metric("journal_seconds_count") > 0


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


async def test_a_tenants_requests_count_at_all_coordinators(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with coordinators(target, redis_server, max_concurrent_requests_per_tenant=2) as (one, two):
        first, second = one.stub.Generate(request()), two.stub.Generate(request())
        await read_tokens(first, 10)
        result = await read_tokens(second, 10)
        for harness in (one, two):
            error = await error_of(harness.stub.Generate(request()))
            assert isinstance(error, Overloaded)
            assert error.reason == "TOO_MANY_REQUESTS_OF_TENANT"
            assert harness.metric("admission_rejects_total", cause="concurrency") == 1
        target.set_limit(None)
        await finish(second, result)
        # The place is free as soon as the stream has ended, at either coordinator.
        assert (await collect(one.stub.Generate(request()))).ids() == result.ids()


async def test_a_tenants_tokens_count_at_all_coordinators_and_at_each_while_redis_is_away(
    redis_server: RedisServer,
) -> None:
    target = ScriptedTarget()
    quota: dict[str, Any] = {"quota_tokens_per_s": 0.001, "quota_burst_tokens": 20.0}
    async with coordinators(target, redis_server, journal_lease_s=SHORT_LEASE_S, **quota) as (one, two):
        await collect(one.stub.Generate(request()))
        store = connect(redis_server.url, PATIENT)

        async def is_used_up() -> bool:
            return await store.take_tokens("", 0, 0.001, 20.0) > 0

        await eventually(is_used_up, "the tokens of the first request are counted")
        error = await error_of(two.stub.Generate(request()))
        assert isinstance(error, Overloaded)
        assert error.reason == "QUOTA_EXCEEDED"
        assert error.retry_after_s >= 1000
        await store.close()
        redis_server.stop()
        await metric_is(one, "store_up", 0)
        await metric_is(two, "store_up", 0)
        # What one has admitted it still knows; the other admitted nothing, so its own bucket is full.
        assert isinstance(await error_of(one.stub.Generate(request())), Overloaded)
        await collect(two.stub.Generate(request()))
        assert isinstance(await error_of(two.stub.Generate(request())), Overloaded)


async def test_a_client_whose_coordinator_was_killed_gets_everything_from_another(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    target = ScriptedTarget()
    target.limit = 40
    await target.start()
    metrics_port = free_port()
    settings: dict[str, Any] = {
        "targets": [target.address],
        "redis_url": redis_server.url,
        "redis_timeout_s": 20.0,
        "resume_secret": SECRET,
        "journal_lease_s": LONG_S,
    }
    body = request(max_tokens=100, request_id="mine")
    opened = [
        another("coordinator", tmp_path / "one", **settings),
        another("coordinator", tmp_path / "two", **settings, metrics_port=metrics_port),
    ]
    # In threads: the target, which they wait for, is served by this one.
    one, two = [await asyncio.to_thread(context.__enter__) for context in opened]
    try:
        async with stub_of(one) as first_stub, stub_of(two) as second_stub:
            first = await read_tokens(first_stub.Generate(body), 40)
            await journal_has(redis_server, "mine", first.ids())
            await asyncio.to_thread(one.kill, "coordinator")
            # Without the token it is an id that runs: the lease of its owner has most of its time to go.
            assert isinstance(await error_of(second_stub.Generate(body)), RequestExists)
            target.set_limit(None)
            nothing = Result(started=first.started)
            whole = await collect(second_stub.Generate(resumed(nothing, body)))
            undisturbed = await collect(second_stub.Generate(request(max_tokens=100)))
        samples = scrape(metrics_port)
    finally:
        for context in opened:
            await asyncio.to_thread(context.__exit__, None, None, None)
        await target.stop()
    assert whole.ids() == undisturbed.ids() == expected_ids(target, 100)
    assert whole.texts == undisturbed.texts
    assert [num for _, _, num in target.opened] == [3, 43, 3]
    computed = sum(value for name, value in samples.items() if name.startswith("specdec_coordinator_tokens_total{"))
    assert computed == 60 + 100


@asynccontextmanager
async def stub_of(cluster: Cluster) -> AsyncIterator[api_grpc.CoordinatorServiceStub]:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        yield api_grpc.CoordinatorServiceStub(channel)
