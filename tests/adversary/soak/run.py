"""A soak: load at a share of capacity for long, with churn; what grows meanwhile, and what is left after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.adversary.fleet import Fleet, FleetSettings
from tests.adversary.soak.load import Load
from tests.adversary.soak.samples import Sample, sample_with, still_held
from tests.adversary.soak.slopes import Growth, growths
from tests.adversary.soak.tenants import Tenants
from tests.adversary.waiting import until
from tests.adversary.workload import Sizes

SAMPLE_S = 10.0
TENANTS_CHANGE_S = 20.0
NUM_TENANTS = 6
WARM_UP_S = 10.0
RELEASE_S = 90.0
"""After the load: sessions of clients that left live for 60 s."""
KEY_FILE = "keys.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    """How long and how hard."""

    minutes: float
    share: float
    capacity_s: float
    sizes: Sizes
    seed: int


@dataclass(slots=True, kw_only=True)
class SoakResult:
    """What came of it."""

    capacity_per_s: float
    rate_per_s: float
    counts: dict[str, int] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    num_tenants: int = 0
    num_connections: int = 0
    failures: list[str] = field(default_factory=list)
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By service with a host: bytes at their highest, and processes that were killed for want of memory."""


async def run_soak(
    fleet_settings: FleetSettings, settings: SoakSettings, folder: Path, say: Callable[[str], None]
) -> SoakResult:
    """Run to the end. Raises FleetFailed when the fleet does not start."""
    tenants = Tenants(folder / KEY_FILE, NUM_TENANTS)
    coordinator = {**fleet_settings.coordinator, "api_keys_file": folder / KEY_FILE}
    fleet_settings = replace(fleet_settings, coordinator=coordinator, api_key=tenants.operator)
    async with Fleet(fleet_settings, folder, say) as fleet:
        load = Load(fleet, tenants, settings.sizes, settings.seed)
        try:
            return await _soak(fleet, load, tenants, settings, say)
        finally:
            await load.close()


async def _soak(
    fleet: Fleet, load: Load, tenants: Tenants, settings: SoakSettings, say: Callable[[str], None]
) -> SoakResult:
    await load.prepare()
    num_clients = fleet.topology.num_clients
    await load.closed_loop(num_clients, WARM_UP_S)
    capacity = await load.closed_loop(num_clients, settings.capacity_s)
    result = SoakResult(capacity_per_s=capacity, rate_per_s=settings.share * capacity)
    say(f"{num_clients} clients get {capacity:.2f} answers/s; load at {result.rate_per_s:.2f}/s begins")
    load.latencies.take()
    load.counts.clear()
    seconds = settings.minutes * 60
    loading = asyncio.create_task(load.open_loop(result.rate_per_s, seconds), name="load")
    changing = asyncio.create_task(_change(tenants), name="tenants")
    began_s = time.monotonic()
    try:
        while not loading.done() and time.monotonic() < began_s + seconds:
            await asyncio.wait([loading], timeout=SAMPLE_S)
            sample = await sample_with(fleet, load.latencies.take())
            result.samples.append(sample)
            result.times_s.append(time.monotonic() - began_s)
            say(_line(sample, load))
        await loading
    finally:
        for task in (loading, changing):
            task.cancel()
        await asyncio.gather(loading, changing, return_exceptions=True)
    held: list[str] = []

    async def is_released() -> bool:
        held[:] = await asyncio.to_thread(still_held, fleet)
        return not held

    await until(is_released, RELEASE_S)
    result.counts, result.num_tenants = dict(load.counts), tenants.num_ever
    result.num_connections = load.num_connections
    result.growths = growths(result.times_s, result.samples)
    result.memory = {} if fleet.hosts is None else fleet.hosts.peaks()
    result.failures = [
        *load.failures,
        *(
            f"{killed} processes of {name} were killed at its limit"
            for name, (_, killed) in result.memory.items()
            if killed
        ),
        *(f"{ending.name} ended with {ending.exit_code}" for ending in fleet.endings),
        *(f"{RELEASE_S:g} s after the load {line}" for line in held),
        *(
            f"{one.name} grew by {one.growth:.4g}, more than {one.allowed:.4g}"
            for one in result.growths
            if not one.is_flat
        ),
    ]
    if load.counts["not sent"]:
        result.failures.append(f"{load.counts['not sent']} requests were not sent: the load was above the capacity")
    return result


async def _change(tenants: Tenants) -> None:
    while True:
        await asyncio.sleep(TENANTS_CHANGE_S)
        tenants.change()


def _line(sample: Sample, load: Load) -> str:
    def of(suffix: str) -> float:
        return sum(value for name, value in sample.items() if name.endswith(suffix))

    p99 = sample.get("clients between_tokens_s p99", float("nan"))
    return (
        f"{load.counts['ended']} requests, {load.counts['failed']} failed, {load.counts['refused']} refused;"
        f" USS {of('uss_bytes') / 1e6:.0f} MB, {of('descriptors'):.0f} descriptors, {of(' threads'):.0f} threads,"
        f" {of('kv_blocks_used'):.0f} blocks, {of(' sessions'):.0f} sessions, {of('redis keys'):.0f} keys,"
        f" p99 between chunks {p99 * 1000:.0f} ms"
    )
