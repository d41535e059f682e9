"""What a fleet takes and holds at one moment."""

from __future__ import annotations

import asyncio
import contextlib

import psutil

from tests.adversary.fleet import Fleet
from tests.adversary.recovery import percentile
from tests.adversary.soak.load import Latencies
from tests.adversary.topology import role_of
from tests.support.services.faults import scrape

GAUGES = {
    "target": ("sessions", "kv_blocks_used", "kv_blocks_cached"),
    "draft": ("sessions", "kv_blocks_used", "kv_blocks_cached"),
    "coordinator": ("sessions", "requests_running"),
}
MUST_END_AT_ZERO = ("sessions", "kv_blocks_used", "requests_running")
Sample = dict[str, float]


def take_sample(fleet: Fleet) -> Sample:
    """Memory, descriptors and threads of every process, gauges of every service, keys of Redis; blocks."""
    sample: Sample = {}
    for name, process in fleet.processes().items():
        with contextlib.suppress(psutil.Error):
            memory = process.memory_full_info()
            sample[f"{name} rss_bytes"] = memory.rss
            sample[f"{name} uss_bytes"] = memory.uss
            sample[f"{name} descriptors"] = process.num_fds()
            sample[f"{name} threads"] = process.num_threads()
    for name, port in fleet.metrics_ports.items():
        role = role_of(name)
        page = scrape(port)
        for gauge in GAUGES[role]:
            sample[f"{name} {gauge}"] = page[f"specdec_{role}_{gauge}"]
    sample["redis keys"] = fleet.redis.num_keys()
    return sample


async def sample_with(fleet: Fleet, latencies: Latencies) -> Sample:
    """A sample, with what clients felt since the one before."""
    sample = await asyncio.to_thread(take_sample, fleet)
    for name, values in (("first_token_s", latencies.first_token_s), ("between_tokens_s", latencies.between_s)):
        if values:
            sample[f"clients {name} p50"] = percentile(values, 0.5)
            sample[f"clients {name} p99"] = percentile(values, 0.99)
    return sample


def still_held(fleet: Fleet) -> list[str]:
    """What is not zero though nobody asks for anything; blocks."""
    sample = take_sample(fleet)
    return [
        f"{name} is {value:g}"
        for name, value in sample.items()
        if name.partition(" ")[2] in MUST_END_AT_ZERO and value != 0
    ]
