"""Whether services of a fleet answer, and coordinators use all replicas; gateways that hang are ended."""

from __future__ import annotations

import asyncio
import time

import grpc
import httpx2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.commands.up.service_process import ServiceProcess
from specdec.service.standstill import Standstill
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc
from tests.adversary.topology import Topology, role_of

PROBE_S = 1.0
ASK_S = 2.0
"""Seconds between two health checks of a gateway that answers, as under `specdec up`."""


async def unhealthy(name: str, service: ServiceProcess) -> list[str]:
    """What is wrong with a service, asked past the proxy; empty: it answers SERVING within a second."""
    if not service.is_running:
        return [f"{name} does not run"]
    if role_of(name) == "gateway":
        status = await gateway_status(service)
        return [] if status == 200 else [f"{name} is not serving: {status or 'no answer'}"]
    async with grpc.aio.insecure_channel(service.spec.address) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PROBE_S)
        except grpc.aio.AioRpcError as error:
            return [f"{name}: {error.code().name}"]
    is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return [] if is_serving else [f"{name} is not serving"]


async def gateway_status(service: ServiceProcess) -> int | None:
    """Status of a gateway's /health, 0 if it takes no connection; None: it takes one and says nothing."""
    async with httpx2.AsyncClient(timeout=PROBE_S) as client:
        try:
            return (await client.get(f"http://{service.spec.address}/health")).status_code
        except httpx2.TimeoutException:
            return None
        except httpx2.HTTPError:
            return 0


async def not_ready(coordinator: ServiceProcess, topology: Topology, api_key: str | None) -> list[str]:
    """What a coordinator lacks: a replica that it uses, its store."""
    wanted, name = topology.num_targets + topology.num_drafts, coordinator.spec.name
    metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
    async with grpc.aio.insecure_channel(coordinator.spec.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        try:
            status = await stub.GetStatus(api.GetStatusRequest(), timeout=PROBE_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return [f"{name} has no status: {error.code().name}"]
    states = [f"{r.role} {r.address} is {r.state} {r.detail}".rstrip() for r in status.replicas]
    ready = sum(replica.state == "ready" for replica in status.replicas)
    degraded = [f"{name}: {line}" for line in status.degraded]
    return degraded if ready >= wanted else [f"{name} sees {ready} of {wanted} ready: {'; '.join(states)}"]


async def end_when_hung(service: ServiceProcess) -> None:
    """Ask a gateway for ever, and kill it when it hangs, as `specdec up` and Compose do: clients of a frozen gateway
    cannot go elsewhere before their connections break."""
    standstill = Standstill()
    while True:
        if service.is_running and service.pid is not None:
            if await gateway_status(service) is not None:
                standstill.answered()
            elif standstill.is_hung(service.pid, time.monotonic()):
                standstill.answered()
                service.kill()
        await asyncio.sleep(0.0 if standstill.is_silent else ASK_S)
