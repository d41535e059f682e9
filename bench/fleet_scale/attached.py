"""What attached replicas cost a coordinator: measured on a real one, with idle replicas that report their loads.

    python -m bench.fleet_scale.attached --replicas 32,128,512

A quarter of the replicas are targets. They are served by another process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import structlog
from prometheus_client import CollectorRegistry

from specdec.config import CoordinatorSettings
from specdec.coordinator.service import CoordinatorService
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

_REPORT_S, _MEASURED_S, _PICKS = 0.25, 8.0, 50
_TOKENIZER = Path(__file__).parents[2] / "models" / "target"
_IDENTITY = pb.ModelIdentity(name="idle", vocab_size=1000, max_model_len=4096, numerics_id="n", eos_token_ids=[1])


class _Idle:
    """A replica that holds no session. `response` is its frames' type."""

    response: Any = None

    async def GetReplicaInfo(self, request: Any, context: Any) -> pb.GetReplicaInfoResponse:  # noqa: N802
        """Its model."""
        return pb.GetReplicaInfoResponse(identity=_IDENTITY)

    async def frames(self) -> AsyncIterator[Any]:
        """The answer to the attach, then loads."""
        yield self.response(attached=pb.Attached(identity=_IDENTITY))
        for number in range(10**9):
            await asyncio.sleep(_REPORT_S)
            yield self.response(load=pb.LoadReport(num_running=number % 200, num_sessions=number % 200, draft_credit=4))


class _Target(_Idle, target_pb2_grpc.TargetServiceServicer):
    response = target_pb2.VerifyResponse

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """One stream."""
        async for frame in self.frames():
            yield frame


class _Draft(_Idle, draft_pb2_grpc.DraftServiceServicer):
    response = draft_pb2.DraftResponse

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """One stream."""
        async for frame in self.frames():
            yield frame


def _serve(num_targets: int, num_drafts: int, told: Connection) -> None:
    async def serve() -> None:
        servers, ports = [], []
        for number in range(num_targets + num_drafts):
            server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            if number < num_targets:
                target_pb2_grpc.add_TargetServiceServicer_to_server(_Target(), server)  # type: ignore[abstract]
            else:
                draft_pb2_grpc.add_DraftServiceServicer_to_server(_Draft(), server)
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
            servers.append(server)
        told.send(ports)
        await asyncio.Event().wait()

    asyncio.run(serve())


async def measure(num_replicas: int) -> str:
    """Measure with a number of replicas; returns a row."""
    num_targets = max(1, num_replicas // 4)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    replicas = context.Process(target=_serve, args=(num_targets, num_replicas - num_targets, there), daemon=True)
    replicas.start()
    addresses = [f"127.0.0.1:{port}" for port in await asyncio.to_thread(here.recv)]
    settings = CoordinatorSettings(
        targets=tuple(addresses[:num_targets]), drafts=tuple(addresses[num_targets:]), tokenizer=_TOKENIZER
    )
    service = CoordinatorService(settings, CollectorRegistry())
    began_s = time.process_time()
    await service.start()
    while not all(link.is_ready for link in service.fleet.links):
        await service.fleet.wait_changed()
    attach_s, began_s, clock_s = time.process_time() - began_s, time.process_time(), time.monotonic()
    await asyncio.sleep(_MEASURED_S)
    use = (time.process_time() - began_s) / (time.monotonic() - clock_s)
    began_s = time.process_time()
    for _ in range(_PICKS):
        service.fleet.pick_draft(0)
    pick_s = (time.process_time() - began_s) / _PICKS
    await service.stop()
    replicas.kill()
    report_s = use * _REPORT_S / num_replicas
    return (
        f"| {num_replicas} | {attach_s / num_replicas * 1e3:.2f} | {use:.1%} | {report_s * 1e6:.0f} | "
        f"{pick_s * 1e3:.2f} |"
    )


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="32,128,512", help="numbers of replicas, by commas")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    print("| replicas | ms per attach | of a core, idle | us per load report | ms per choice of a draft |")
    print("|---|---|---|---|---|")
    for num in map(int, options.replicas.split(",")):
        print(asyncio.run(measure(num)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
