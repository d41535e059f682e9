"""The last part of an engine process's start: announce the model, then run the loop."""

from __future__ import annotations

import gc

import structlog

from specdec.config import DraftSettings, TargetSettings
from specdec.replica.bridge.frames import EnginePort, FrameKind
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.loop import EngineWorker
from specdec.replica.worker.pending_responses import ResponseLimits
from specdec.replica.worker.role import Role, Wire
from specdec.replica.worker.sessions import SESSION_TTL_S, SessionT
from specdec.v1 import common_pb2 as pb

FLUSH_TIMEOUT_S = 2.0
"""Seconds to send the last frames."""
COLLECT_EVERY = 20_000
"""Number of new objects after which garbage is collected: a step of 64 sessions makes 1,300 that live until the next,
and Python's 700 would look through them twice per step."""


def report_fatal(port: EnginePort, reason: str) -> None:
    """Tell the servicer why the engine cannot start."""
    port.send(FrameKind.FATAL, payload=reason.encode())
    port.flush(FLUSH_TIMEOUT_S)


def make_host(
    port: EnginePort, settings: TargetSettings | DraftSettings, wire: Wire, info: pb.GetReplicaInfoResponse
) -> SessionHost[SessionT]:
    """The session host of a role on this port; `info` gets the instance id of this start."""
    info.instance_id = port.instance_id
    limits = ResponseLimits(settings.max_message_bytes, settings.stream_buffer_bytes)
    return SessionHost[SessionT](port, wire, info.identity, SESSION_TTL_S, limits, port.steps)


def serve(
    port: EnginePort,
    settings: TargetSettings | DraftSettings,
    wire: Wire,
    info: pb.GetReplicaInfoResponse,
    host: SessionHost[SessionT],
    role: Role[SessionT],
    full_step_s: float = 0.0,
) -> None:
    """Announce the model, and run the role until the servicer goes or stops it.

    `full_step_s`: upper estimate of a turn's time in seconds.
    """
    identity = info.identity
    traces = settings.otlp_endpoint is not None
    worker = EngineWorker(port, wire, info, host, role, traces=traces, pulse=port.pulse)
    if not wire.joins_links:
        worker.links.streams.socket_name = port.local.listen()
    port.pulse.expect_turn(full_step_s)
    log = structlog.get_logger("specdec.replica.worker")
    log.info("ready", model=identity.name, numerics_id=identity.numerics_id, row_invariant=identity.row_invariant)
    info.load.CopyFrom(role.load())
    gc.collect()
    gc.freeze()  # the model's objects live for ever: collections between steps need not walk them
    gc.set_threshold(COLLECT_EVERY)
    port.send(FrameKind.READY, payload=info.SerializeToString())
    worker.run()
    port.flush(FLUSH_TIMEOUT_S)
