"""Steps that serve streams: exact fail-over, and the GPU's gaps between steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.gpu_slot import models
from bench.gpu_slot.models import Found, StepSetup
from bench.prompts import held_out_prompts
from specdec.client import Client, Completion
from specdec.commands.measuring.requests import Sampling, make_request, run_group
from specdec.commands.up.cluster import Cluster, free_port
from specdec.commands.up.plan import LocalPlan, plan_services, shipped_model
from specdec.v1 import coordinator_pb2 as api

_GAP = "specdec_target_device_gap_seconds_bucket"
_KV_BYTES = 2 << 30
_POLL_S = 0.02
_KEPT = ("tokenizer.json", "tokenizer_config.json")
Counts = dict[float, float]
"""Cumulative counts of a histogram, by bucket bound."""


def failover(place: StepSetup) -> Found:
    """Number of streams whose tokens stay the same when one of two `deterministic` targets on a GPU is killed.

    Raises AssertionError unless all do. The engines do not use MPS, where a killed client may end the others.
    """
    num_streams, num_tokens = (6, 200) if place.dry else (100, 800)
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
    with _running(plan) as cluster:
        found, undisturbed, disturbed = asyncio.run(_compared(cluster, requests))
    same = sum(a.identity == b.identity for a, b in zip(undisturbed, disturbed, strict=True))
    found |= {"streams": num_streams, "streams equal after a target was killed": same}
    place.keep(found)
    if same < num_streams or not found["streams on the target that was killed"]:
        raise AssertionError(found)
    return found


def gaps(place: StepSetup) -> Found:
    """Median times in which the GPU computes nothing between two steps, at 1 and 8 streams.

    Served are an 8B model without speculation, and the shipped pair, whose steps are too short to hide the host's work.
    """
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        large = shipped_model("target") if place.dry else _random_8b(Path(folder))
        for name, target, draft in (("8b", large, ""), ("shipped pair", shipped_model("target"), "draft")):
            metrics_port = free_port()
            settings: dict[str, object] = {"metrics_port": metrics_port}
            if not place.dry:
                settings |= {"kv_cache_memory_bytes": 2 * _KV_BYTES}
                settings |= {} if draft else {"load_format": "dummy", "self_test": False}
            plan = LocalPlan(
                target_model=target,
                draft_model=shipped_model("draft") if draft else target,
                device=place.device.type,
                num_drafts=int(bool(draft)),
                free_ports=True,
                target_settings=settings,
                draft_settings={"kv_cache_memory_bytes": _KV_BYTES} if draft and not place.dry else {},
            )
            with _running(plan) as cluster:
                for num_streams in (1,) if place.dry else (1, 8):
                    before = _gap_counts(metrics_port)
                    asyncio.run(_served(cluster.address, num_streams, 16 if place.dry else 128, bool(draft)))
                    median_s = _median(before, _gap_counts(metrics_port))
                    label = f"{name}: gap at {num_streams} streams, median us"
                    found[label] = None if median_s is None else round(median_s * 1e6, 1)
                    place.keep(found)
    return found


@contextlib.contextmanager
def _running(plan: LocalPlan) -> Iterator[Cluster]:
    with Cluster(plan_services(plan)) as cluster:
        cluster.start()
        yield cluster


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


async def _served(address: str, num_streams: int, num_tokens: int, speculate: bool) -> None:
    prompts = held_out_prompts(Path(shipped_model("target")), num_streams)
    await run_group(address, prompts, Sampling(max_tokens=num_tokens), speculate=speculate)


def _gap_counts(metrics_port: int) -> Counts:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        float(sample.labels["le"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == _GAP
    }


def _median(before: Mapping[float, float], after: Mapping[float, float]) -> float | None:
    """Median of the values counted between two readings, interpolated as Prometheus does; None where there are none."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    half = max(counts.values(), default=0.0) / 2
    low, below = 0.0, 0.0
    for bound, count in counts.items():
        if half and count >= half:
            share = (half - below) / (count - below)
            return low + share * (bound - low) if bound != float("inf") else low
        low, below = bound, count
    return None


def _random_8b(folder: Path) -> str:
    """A model without weights, of the 8B shape, with the shipped tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "max_position_embeddings": 2048,
        **models.SHAPES["8b"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in _KEPT:
        (folder / name).write_bytes((Path(shipped_model("target")) / name).read_bytes())
    return str(folder)
