"""The draft's engine process."""

from __future__ import annotations

from prometheus_client import REGISTRY

from specdec.config import DraftSettings
from specdec.drafting.drafter import Drafter
from specdec.drafting.metrics import DraftRecorder
from specdec.rpc.bridge.frames import EnginePort
from specdec.telemetry import DraftMetrics
from specdec.v1 import draft_pb2
from specdec.worker.build import run_role
from specdec.worker.role import Wire

_WIRE = Wire(draft_pb2.DraftRequest, draft_pb2.DraftResponse, draft_pb2.DraftResult, "draft session", "draft")


def run_engine(port: EnginePort, settings: DraftSettings) -> None:
    """Entry of the process: returns when the servicer is gone or says stop."""
    recorder = DraftRecorder(DraftMetrics(REGISTRY))
    run_role(port, settings, _WIRE, "draft-engine", lambda host, built: Drafter(host, built, settings, recorder))
