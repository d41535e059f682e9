"""Coordinators that share a Redis: ids are unique over them, and one takes up what another began."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.commands.up.cluster import Cluster, free_port
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from specdec.wire.errors import (
    Cancelled,
    InvalidRequest,
    RequestExists,
    Unavailable,
)
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.shared_redis import LONG_S, SHORT_LEASE_S, coordinators, journal_has, metric_is
from tests.support.services.coordinator_harness import (
    Result,
    collect,
    error_of,
    expected_ids,
    finish,
    read_tokens,
    request,
    resumed,
)
from tests.support.services.faults import another, scrape

pytestmark = [pytest.mark.integration, pytest.mark.smoke]

SECRET = "a secret that two coordinators share"


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
