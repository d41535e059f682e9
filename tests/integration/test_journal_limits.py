"""What a tenant may use counts at all coordinators that share a Redis."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.store.urls import connect
from specdec.wire.errors import (
    Overloaded,
)
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.shared_redis import PATIENT, SHORT_LEASE_S, coordinators, metric_is
from tests.support.services.coordinator_harness import (
    collect,
    error_of,
    finish,
    read_tokens,
    request,
)
from tests.support.services.faults import eventually

pytestmark = pytest.mark.integration


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
