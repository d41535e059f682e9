"""A target's or a draft's process, of the product's parts: relay, worker, sessions, role, engine."""

from __future__ import annotations

from functools import cache
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from specdec.config import DraftSettings, TargetSettings
from specdec.replica.bridge.frame_codec import FrameKind
from specdec.replica.bridge.link_dialer import LinkDialer
from specdec.replica.bridge.stream_relay import StreamRelay
from specdec.telemetry import RelayMetrics
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2
from tests.protocol.simulation.engine_process import SimulatedEngine
from tests.protocol.simulation.link_safety import LinkSafety
from tests.protocol.simulation.network import Network
from tests.protocol.simulation.nodes import address_of
from tests.protocol.simulation.safety import EngineSafety, Violations
from tests.protocol.simulation.server import Server
from tests.protocol.simulation.virtual_loop import Process

_SERVICES = {
    "target": (target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name, "Verify"),
    "draft": (draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name, "Draft"),
}
_METHODS = [*_SERVICES.values(), (_SERVICES["target"][0], "Link")]
STREAMS = tuple(f"/{service}/{method}" for service, method in _METHODS)
"""The methods that stream; the last one joins drafts and targets."""


@cache
def _settings(role: str) -> TargetSettings | DraftSettings:
    if role == "target":
        return TargetSettings(model="tiny-target", hold_off_ms=0.0)
    return DraftSettings(
        model="tiny-draft", max_ahead_tokens=2, max_heads=1, num_siblings=0, link_targets=(address_of("target-1"),)
    )


@cache
def _relay_metrics(role: str) -> RelayMetrics:
    return RelayMetrics(CollectorRegistry(), role)


class ReplicaLife:
    """From its start to its end. Its engine turns when it is told to."""

    def __init__(self, network: Network, role: str, number: int, violations: Violations) -> None:
        self.name = f"{role}-1"
        self.process = Process(network.loop, self.name)
        self._is_turn_due = False
        self._role = role
        self._loop = network.loop
        self.process.call(self._start, network, number)
        safety = EngineSafety(f"{self.name}.{number}", self.core, violations)
        LinkSafety(f"{self.name}.{number}", self.core.worker.links, violations)
        self.engine.spy = lambda engine, taken, sent: safety.after_turn(sent)

    @property
    def is_turn_due(self) -> bool:
        """Its engine has something to do."""
        return self._is_turn_due or any(f.kind is not FrameKind.STREAM_OPENED for f in self.core.port.inbox)

    def turn(self) -> None:
        """One turn of its engine, as a callback: a draft's servicer begins tasks."""
        self._loop.call_soon(self.engine.turn)
        self._loop.run_until_idle()
        self._is_turn_due = self.core.role.wait_s(self._loop.time()) == 0

    def kill(self, network: Network) -> None:
        """Its process is gone."""
        self.process.kill()
        self.engine.process.kill()
        network.died(self.process)

    def _start(self, network: Network, number: int) -> None:
        role = self._role
        settings = _settings(role)
        self._dialer = LinkDialer(settings, _relay_metrics(role)) if isinstance(settings, DraftSettings) else None
        on_dial: Any = None if self._dialer is None else self._dialer.dial
        self.engine = SimulatedEngine(
            role, settings, network.loop, f"life-{number}", lambda: 0.0, session_ttl_s=1e6, on_dial=on_dial
        )
        self.core = self.engine.load()
        engine: Any = self.engine
        self.relay = StreamRelay(lambda: engine, _relay_metrics(role), 1 << 20)
        links = StreamRelay(lambda: engine, _relay_metrics(role), 1 << 20, is_link=True)
        server = Server(network, self.process, address_of(self.name))
        service, method = _SERVICES[role]
        handlers: dict[str, Any] = {
            method: grpc.stream_stream_rpc_method_handler(self.relay.handle),
            "Link": grpc.stream_stream_rpc_method_handler(links.handle),
            "GetReplicaInfo": grpc.unary_unary_rpc_method_handler(
                self._info,  # type: ignore[arg-type]
                request_deserializer=pb.GetReplicaInfoRequest.FromString,
                response_serializer=pb.GetReplicaInfoResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.start()

    async def _info(self, _request: Any, _context: Any) -> pb.GetReplicaInfoResponse:
        assert self.engine.info is not None
        return self.engine.info
