"""Load under the names by which an endpoint picker of the Gateway API chooses among coordinators and gateways."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from specdec.v1 import common_pb2 as pb
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import collect, read_tokens, request, running
from tests.support.services.faults import eventually
from tests.support.services.gateways import gateway


async def shows(registry: CollectorRegistry, **expected: float) -> None:
    """Wait until the metrics have these values."""

    async def are_so() -> bool:
        return all(registry.get_sample_value(f"vllm:{name}") == value for name, value in expected.items())

    await eventually(are_so, f"{expected}")


async def test_a_coordinator_tells_its_queue_and_the_kv_use_of_its_targets() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    async with running(targets, picker_metrics=True, max_running=1) as harness:
        targets[0].set_limit(10)
        targets[1].set_limit(10)
        first = harness.stub.Generate(request())
        await read_tokens(first, 10)
        second = harness.stub.Generate(request())
        await shows(harness.registry, num_requests_running=1, num_requests_waiting=1)
        for link, used in zip(harness.service.fleet.targets, (30, 10), strict=True):
            link.on_load(pb.LoadReport(kv_blocks_used=used, kv_blocks_total=50))
        await shows(harness.registry, kv_cache_usage_perc=0.4)
        info = harness.registry.get_sample_value("vllm:cache_config_info", {"block_size": "32", "num_gpu_blocks": ""})
        assert info == 1
        for target in targets:
            target.set_limit(None)
        await asyncio.gather(collect(first), collect(second))
        await shows(harness.registry, num_requests_running=0, num_requests_waiting=0)


async def test_a_coordinator_has_other_names_on_its_page_only_if_it_is_told() -> None:
    async with running([ScriptedTarget()]) as harness:
        assert not [family for family in harness.registry.collect() if family.name.startswith("vllm:")]


async def test_a_gateway_tells_requests_without_output_and_those_with() -> None:
    target = ScriptedTarget()
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 20}
    async with running([target]) as harness, gateway(harness.address) as one, one.http() as client:
        target.set_limit(0)
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        await shows(one.parts.registry, num_requests_waiting=2, num_requests_running=0)
        target.set_limit(10)
        await shows(one.parts.registry, num_requests_waiting=0, num_requests_running=2)
        target.set_limit(0)
        asked.append(asyncio.create_task(client.post("/v1/completions", json=body)))
        await shows(one.parts.registry, num_requests_waiting=1, num_requests_running=2)
        target.set_limit(None)
        assert [(await each).status_code for each in asked] == [200, 200, 200]
        await shows(one.parts.registry, num_requests_waiting=0, num_requests_running=0)
