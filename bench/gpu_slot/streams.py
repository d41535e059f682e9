"""The step of the slot that kills a target under streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.gpu_slot.models import Found, StepSetup
from bench.prompts import held_out_prompts
from specdec.client import Client, Completion
from specdec.commands.measuring.requests import Sampling, make_request
from specdec.commands.up.cluster import Cluster
from specdec.commands.up.plan import LocalPlan, plan_services, shipped_model
from specdec.v1 import coordinator_pb2 as api

_KV_BYTES = 2 << 30
_POLL_S = 0.02


def failover(place: StepSetup) -> Found:
    """Number of streams whose tokens stay the same when one of two `deterministic` targets on a GPU is killed.

    Raises AssertionError unless all do. The engines do not use MPS, where a killed client may end the others.
    """
    num_streams, num_tokens = (6, 200) if place.dry else (30, 800)
    plan = LocalPlan(
        target_model=shipped_model("target"),
        draft_model=shipped_model("draft"),
        device=place.device.type,
        num_targets=2,
        free_ports=True,
        target_settings={"deterministic": True, "kv_cache_memory_bytes": _KV_BYTES // (8 if place.dry else 1)},
        draft_settings={} if place.dry else {"kv_cache_memory_bytes": _KV_BYTES},
    )
    requests = _requests(num_streams, num_tokens)
    with Cluster(plan_services(plan)) as cluster:
        cluster.start()
        found, undisturbed, disturbed = asyncio.run(_compared(cluster, requests))
    same = sum(a.identity == b.identity for a, b in zip(undisturbed, disturbed, strict=True))
    found |= {"streams": num_streams, "streams equal after a target was killed": same}
    place.keep(found)
    if same < num_streams or not found["streams on the target that was killed"]:
        raise AssertionError(found)
    return found


def _requests(num_streams: int, num_tokens: int) -> list[api.GenerateRequest]:
    prompts = held_out_prompts(Path(shipped_model("target")), min(num_streams, 8))
    sampling = [Sampling(temperature=temperature, max_tokens=num_tokens) for temperature in (0.0, 1.0)]
    return [
        make_request(prompts[seed % len(prompts)], sampling[seed % 2], seed, speculate=True)
        for seed in range(num_streams)
    ]


async def _compared(
    cluster: Cluster, requests: Sequence[api.GenerateRequest]
) -> tuple[Found, list[Completion], list[Completion]]:
    """Outputs of the requests undisturbed, and with a target killed once every stream has tokens."""
    async with Client(cluster.address) as client:
        undisturbed = await _streams(client, requests, lambda: None)
        status = await client.status()
        killed = next(each for each in status.replicas if each.address == cluster.services["target-1"].spec.address)
        found: Found = {"numerics": killed.identity.numerics_id}
        began = asyncio.Event()
        streams = asyncio.ensure_future(_streams(client, requests, began.set))
        await began.wait()
        num_there = 0
        while not num_there and not streams.done():  # replicas report a few times a second
            status = await client.status()
            num_there = next(int(each.load.num_sessions) for each in status.replicas if each.address == killed.address)
            await asyncio.sleep(_POLL_S)
        found["streams on the target that was killed"] = num_there
        cluster.services["target-1"].kill()
        return found, undisturbed, await streams


async def _streams(
    client: Client, requests: Sequence[api.GenerateRequest], on_all_begun: Callable[[], None]
) -> list[Completion]:
    """Run requests at once; calls `on_all_begun` when each has its first tokens."""
    waiting = set(range(len(requests)))

    async def one(number: int) -> Completion:
        completion = Completion()
        async for chunk in client.generate(requests[number]):
            completion.add(chunk)
            if completion.num_tokens and number in waiting:
                waiting.remove(number)
                if not waiting:
                    on_all_begun()
        return completion

    return await asyncio.gather(*(one(number) for number in range(len(requests))))
