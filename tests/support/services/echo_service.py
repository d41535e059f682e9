"""A replica whose engine echoes, with the real bridge, relay and service lifecycle, and without a model.

`python -m tests.support.services.echo_service --port 0 --metrics-port 0` serves specdec.v1.TargetService.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from typing import Literal

from google.rpc import code_pb2, error_details_pb2, status_pb2
from prometheus_client import CollectorRegistry

from specdec.replica.bridge.frame_codec import FIRST_DIALLED
from specdec.replica.bridge.frames import EnginePort, FrameKind
from specdec.service.settings import ReplicaServiceSettings
from specdec.telemetry import TargetMetrics
from specdec.v1 import common_pb2
from specdec.wire.error_details import session_key

TOKENIZER_BYTES = 5 * 1024 * 1024 // 2


class EchoSettings(ReplicaServiceSettings):
    """Behaviour of the echo engine."""

    engine_cores: str = "off"
    load: Literal["ready", "hang", "refuse", "crash", "raise", "import"] = "ready"
    drained_at_once: bool = True
    silence_s: float = 4.0


def run_engine(port: EnginePort, settings: EchoSettings) -> None:
    """Echo messages; some payloads are commands."""
    metrics = TargetMetrics(CollectorRegistry())
    _load(port, settings)
    events: list[str] = []
    while True:
        for frame in port.poll(None):
            match frame.kind, frame.payload:
                case FrameKind.STREAM_OPENED, _:
                    events.append(f"opened {frame.stream_id}")
                case FrameKind.STREAM_CLOSED, _:
                    events.append(f"closed {frame.stream_id}")
                case FrameKind.DRAIN, _:
                    if settings.drained_at_once:
                        port.send(FrameKind.DRAINED)
                case FrameKind.SHUTDOWN, _:
                    return
                case FrameKind.CALL, b"hold":
                    events.append(f"called {frame.stream_id}")
                case FrameKind.CALL, b"abort":
                    port.send(FrameKind.STREAM_ABORT, frame.stream_id, _refusal().SerializeToString())
                case FrameKind.CALL, payload:
                    port.send(FrameKind.MESSAGE, frame.stream_id, payload[::-1])
                    port.send(FrameKind.MESSAGE, frame.stream_id, b"one too many")
                case FrameKind.MESSAGE, b"events":
                    port.send(FrameKind.MESSAGE, frame.stream_id, "\n".join(events).encode())
                case FrameKind.MESSAGE, b"pid":
                    port.send(FrameKind.MESSAGE, frame.stream_id, str(os.getpid()).encode())
                case FrameKind.MESSAGE, b"crash":
                    os._exit(3)
                case FrameKind.MESSAGE, b"crash in a step of a and b":
                    port.steps.work_on([session_key("a"), session_key("b")])
                    os._exit(3)
                case FrameKind.MESSAGE, b"kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case FrameKind.MESSAGE, b"hang":
                    port.pulse.begin_turn()
                    threading.Event().wait()
                case FrameKind.MESSAGE, b"dial":
                    port.send(FrameKind.LINK_DIAL, FIRST_DIALLED, b"target:1")
                    port.send(FrameKind.MESSAGE, frame.stream_id, b"dialled")
                case FrameKind.MESSAGE, b"drained":
                    port.send(FrameKind.DRAINED)
                case FrameKind.MESSAGE, b"abort":
                    port.send(FrameKind.MESSAGE, frame.stream_id, b"last words")
                    port.send(FrameKind.STREAM_ABORT, frame.stream_id, _refusal().SerializeToString())
                case FrameKind.MESSAGE, b"flood":
                    for _ in range(64):
                        port.send(FrameKind.MESSAGE, frame.stream_id, bytes(1024 * 1024))
                case FrameKind.MESSAGE, b"load":
                    report = common_pb2.LoadReport(num_running=7)
                    port.send(FrameKind.LOAD, payload=report.SerializeToString())
                    port.send(FrameKind.MESSAGE, frame.stream_id, b"load")
                case FrameKind.MESSAGE, payload:
                    metrics.steps.labels("verify").inc()
                    port.send(FrameKind.MESSAGE, frame.stream_id, payload)


def _load(port: EnginePort, settings: EchoSettings) -> None:
    match settings.load:
        case "hang":
            while True:
                for frame in port.poll(None):
                    if frame.kind is FrameKind.SHUTDOWN:
                        sys.exit(0)
        case "refuse":
            port.send(FrameKind.FATAL, payload=b"ModelNotSupported: no attention")
            port.flush(1.0)
            sys.exit(1)
        case "raise":
            raise ValueError("bad weights")
        case "import":
            sys.modules["torch"] = None  # type: ignore[assignment] # Python's mark of a module that cannot be imported.
            importlib.import_module("torch")
        case "crash":
            os._exit(5)
        case _:
            pass
    port.send(
        FrameKind.TOKENIZER,
        payload=common_pb2.GetTokenizerResponse(
            tokenizer_json=b"t" * TOKENIZER_BYTES, tokenizer_config='{"a": 1}'
        ).SerializeToString(),
    )
    info = common_pb2.GetReplicaInfoResponse(identity=common_pb2.ModelIdentity(name="echo", vocab_size=32))
    port.send(FrameKind.READY, payload=info.SerializeToString())


def _refusal() -> status_pb2.Status:
    status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="attach first")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="NOT_ATTACHED", domain="specdec"))
    return status


def main() -> int:
    """Serve until a signal; grpc is imported here, because the engine process imports this module without it."""
    from specdec.config.sources import settings_or_exit
    from specdec.replica.bridge import engine_process
    from specdec.replica.bridge.replica_service import ReplicaRole, run_replica
    from specdec.v1 import target_pb2

    role = ReplicaRole(
        name="target",
        grpc_name=target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
        stream_method="Verify",
        engine_entry="tests.support.services.echo_service:run_engine",
        serves_tokenizer=True,
        engine_method="SetDrafters",
    )
    settings = settings_or_exit(EchoSettings, sys.argv[1:], env_prefix="SPECDEC_ECHO_", prog="echo")
    engine_process.SILENCE_S = settings.silence_s
    return run_replica(role, settings)


if __name__ == "__main__":
    # The engine process must find the settings class under this module's own name.
    from tests.support.services import echo_service

    sys.exit(echo_service.main())
