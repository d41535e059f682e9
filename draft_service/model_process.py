"""The engine process of a draft with a model."""

from __future__ import annotations

from prometheus_client import REGISTRY

from draft_service.wire import WIRE
from specdec.config import DraftSettings
from specdec.drafting.drafter import Drafter
from specdec.drafting.metrics import DraftRecorder
from specdec.rpc.bridge.frames import EnginePort
from specdec.telemetry import DraftMetrics
from specdec.worker.build import run_role


def run_model(port: EnginePort, settings: DraftSettings) -> None:
    """Draft until the servicer goes or says stop."""
    recorder = DraftRecorder(DraftMetrics(REGISTRY))
    run_role(port, settings, WIRE, "draft-engine", lambda host, built: Drafter(host, built, settings, recorder))
