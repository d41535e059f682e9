"""The target's engine process."""

from __future__ import annotations

from specdec.config import TargetSettings
from specdec.replica.bridge.frames import EnginePort
from specdec.replica.worker.role import Wire
from specdec.v1 import target_pb2

WIRE = Wire(target_pb2.VerifyRequest, target_pb2.VerifyResponse, "verify session", "decode")


def run_engine(port: EnginePort, settings: TargetSettings) -> None:
    """Entry of the process: returns when the servicer closes the port or sends stop.

    Only one of the two is imported: a target behind an endpoint needs no torch.
    """
    if settings.api is not None:
        from specdec.target_service.api.process import run_api

        run_api(port, settings, settings.api, WIRE)
    else:
        from specdec.target_service.model_process import run_model

        run_model(port, settings, WIRE)
