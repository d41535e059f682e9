"""Does to a fleet what a plan says, and undoes it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from functools import partial

import psutil

from tests.adversary.fleet import Fleet
from tests.adversary.plan import HOSTS, KILLS, RESET, SILENCES, SLOWNESSES, STOPS, Fault
from tests.adversary.proxy_link import PLAIN, Flow
from tests.adversary.topology import role_of

HELD = Flow(held=True)
FLOWS = {
    "partition": (HELD, HELD),
    "one-way-to": (HELD, PLAIN),
    "one-way-from": (PLAIN, HELD),
    "delay": (Flow(delay_s=0.1, jitter_s=0.1),) * 2,
    "trickle": (Flow(max_piece_bytes=64, piece_gap_s=0.002),) * 2,
    "lossy": (Flow(delay_s=0.005, jitter_s=0.02, loss=0.05, resend_s=0.2),) * 2,
}
assert set(FLOWS) == {*SILENCES, *SLOWNESSES}
HOUR_S = 3600.0
_SLOW = {"target": 0.05, "draft": 0.05, "coordinator": 0.15, "gateway": 0.15}
"""Share of a core of a slow host. Streams leave slow targets and drafts. Nothing takes them from a coordinator: with a
twentieth of a core, half of what it needs, this fleet's stand still until its host is well again."""
Injected = Callable[[], None]


async def inject(fault: Fault, fleet: Fleet, on_injected: Injected) -> None:
    """Return when the fault is over. A service that was killed is then about to be started, by the fleet.

    Args:
        on_injected: Called at the moment when it begins.
    """
    if fault.kind in KILLS:
        fleet.restart_s[fault.at] = fault.heal_after_s
        on_injected()
        _kill(fault, fleet)
        await asyncio.sleep(fault.heal_after_s)
    elif fault.kind in STOPS:
        await _stop(fault, fleet, on_injected)
    elif fault.kind in HOSTS:
        await _befall_host(fault, fleet, on_injected)
    elif fault.kind in FLOWS:
        forth, back = FLOWS[fault.kind]
        await fleet.proxy.set_flow(fault.at, forth=forth, back=back)
        on_injected()
        try:
            await asyncio.sleep(fault.heal_after_s)
        finally:
            await fleet.proxy.heal(fault.at)
    elif fault.kind == RESET:
        on_injected()
        await fleet.proxy.reset(fault.at)
    else:
        await _redis(fault, fleet, on_injected)


def _kill(fault: Fault, fleet: Fleet) -> None:
    match fault.kind:
        case "kill-group":
            fleet.services[fault.at].kill()
        case "kill-servicer":
            fleet.services[fault.at].signal(signal.SIGKILL)
        case "kill-engine":
            if engine := fleet.engine_of(fault.at):
                with contextlib.suppress(psutil.Error):
                    engine.kill()
        case "kill-child":
            for child in _children(fault, fleet)[:1]:
                with contextlib.suppress(psutil.Error):
                    child.kill()


async def _stop(fault: Fault, fleet: Fleet, on_injected: Injected) -> None:
    """Stop processes, and let those go on that are still there."""
    stopped = _processes(fault, fleet)
    on_injected()
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.heal_after_s)
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


def _processes(fault: Fault, fleet: Fleet) -> list[psutil.Process]:
    if fault.kind == "stop-engine":
        engine = fleet.engine_of(fault.at)
        return [engine] if engine is not None else []
    if fault.kind == "stop-child":
        return _children(fault, fleet)[:1]
    pid = fleet.services[fault.at].pid
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(pid)
        return [leader] if fault.kind != "stop-group" else [leader, *_children(fault, fleet)]
    return []


def _children(fault: Fault, fleet: Fleet) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(fleet.services[fault.at].pid).children(recursive=True)
    return []


async def _befall_host(fault: Fault, fleet: Fleet, on_injected: Injected) -> None:
    assert fleet.hosts is not None
    host = fleet.hosts[fault.at]
    begin, end = {
        "slow-host": (partial(host.cgroup.slow, _SLOW[role_of(fault.at)]), host.cgroup.relieve),
        "starved-host": (host.cgroup.starve, host.cgroup.relieve),
        "full-disk": (host.disk.fill, host.disk.drain),
    }[fault.kind]
    on_injected()
    begin()
    try:
        await asyncio.sleep(fault.heal_after_s)
    finally:
        end()


async def _redis(fault: Fault, fleet: Fleet, on_injected: Injected) -> None:
    redis = fleet.redis
    if fault.kind == "redis-past":
        await redis.remember()
        await asyncio.sleep(fault.heal_after_s)
    on_injected()
    match fault.kind:
        case "redis-kill" | "primary-kill":
            await redis.kill_for(fault.heal_after_s)
        case "redis-empty":
            await redis.empty()
        case "redis-freeze" | "primary-freeze":
            await redis.freeze_for(fault.heal_after_s)
        case "redis-past":
            await redis.restore()
        case "redis-full":
            await redis.full_for(fault.heal_after_s)
        case "redis-clock-forth":
            await redis.set_clock_for(HOUR_S, fault.heal_after_s)
        case "redis-clock-back":
            await redis.set_clock_for(-HOUR_S, fault.heal_after_s)
        case unknown:
            raise ValueError(f"no fault is called {unknown}")
    fleet.confine_redis()
