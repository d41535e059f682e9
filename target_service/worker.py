"""The target's engine process."""

from __future__ import annotations

from prometheus_client import REGISTRY

from specdec.config import TargetSettings
from specdec.rpc.bridge.frames import EnginePort
from specdec.telemetry import TargetMetrics
from specdec.v1 import target_pb2
from specdec.worker.entry import run_role
from specdec.worker.role import Wire
from target_service.records.metrics import TargetRecorder
from target_service.verifier import Verifier

_WIRE = Wire(target_pb2.VerifyRequest, target_pb2.VerifyResponse, target_pb2.TargetResult, "verify session", "decode")


def run_engine(port: EnginePort, settings: TargetSettings) -> None:
    """Entry of the process: returns when the servicer is gone or says stop."""
    recorder = TargetRecorder(TargetMetrics(REGISTRY))
    run_role(port, settings, _WIRE, "target-engine", lambda host, built: Verifier(host, built, settings, recorder))
