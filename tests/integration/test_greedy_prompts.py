"""Prompts of megabytes, by the dozen: what they cost a coordinator process, and whoever else it serves."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import grpc
import psutil
import pytest

from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from specdec.wire.errors import from_rpc_error
from tests.support.services.coordinator_harness import collect
from tests.support.services.faults import addresses_of, another, make_request

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_PROMPTS = 16
TEXT = "def read_all(path):\n    with open(path) as file:\n        return file.read()  # " * 50_000
MOST_AT_ONCE = 2
MOST_RSS_GROWTH_BYTES = 600_000_000
"""It was 3.3 GB."""
MOST_WAIT_S = 10.0
"""For one polite request on a slow, busy machine. It was 26 s; alone it is some hundredths of a second."""
POLITE = (("specdec-tenant", "polite"),)
GREEDY = (("specdec-tenant", "greedy"),)


async def _outcome(stub: api_grpc.CoordinatorServiceStub, num_bytes: int) -> str:
    body = api.GenerateRequest(prompt=TEXT[:num_bytes])
    body.sampling.max_tokens = 1
    body.sampling.truncate_prompt_tokens = 64  # else their length may be reason enough to refuse all of them
    try:
        await collect(stub.Generate(body, metadata=GREEDY))
    except grpc.RpcError as error:
        return from_rpc_error(error).reason
    return "OK"


@pytest.mark.parametrize("num_bytes", [4_100_000, 20_000])
async def test_prompts_of_megabytes_cost_no_memory_and_no_other_tenant_its_time(
    tiny_cluster: Cluster, tmp_path: Path, num_bytes: int
) -> None:
    settings: dict[str, object] = {
        **addresses_of(tiny_cluster),
        "max_concurrent_requests_per_tenant": MOST_AT_ONCE,
        "max_prompt_bytes": 8 * 1024 * 1024,
    }
    with another("coordinator", tmp_path, **settings) as cluster:
        service = cluster.services["coordinator"]
        process = psutil.Process(service.pid)
        async with (
            grpc.aio.insecure_channel(service.spec.address) as channel,
            grpc.aio.insecure_channel(service.spec.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other,
        ):
            polite, greedy = api_grpc.CoordinatorServiceStub(other), api_grpc.CoordinatorServiceStub(channel)
            await collect(polite.Generate(make_request(max_tokens=2), metadata=POLITE))
            before_bytes = peak_bytes = process.memory_info().rss
            flood = [asyncio.create_task(_outcome(greedy, num_bytes)) for _ in range(NUM_PROMPTS)]
            waits_s = []
            while not all(task.done() for task in flood):
                began_s = time.monotonic()
                await collect(polite.Generate(make_request(max_tokens=2), metadata=POLITE))
                waits_s.append(time.monotonic() - began_s)
                peak_bytes = max(peak_bytes, process.memory_info().rss)
            outcomes = Counter(task.result() for task in flood)
    growth_bytes, longest_s = peak_bytes - before_bytes, max(waits_s)
    allowed = (
        "OK" if num_bytes < 1_000_000 else "CONTEXT_LENGTH_EXCEEDED"
    )  # no context of this model can hold so much text
    assert outcomes[allowed]
    assert outcomes[allowed] + outcomes["TOO_MANY_REQUESTS_OF_TENANT"] == NUM_PROMPTS
    assert growth_bytes < MOST_RSS_GROWTH_BYTES
    assert longest_s < MOST_WAIT_S
