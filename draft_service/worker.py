"""The draft's engine process."""

from __future__ import annotations

from specdec.config import DraftSettings
from specdec.replica.bridge.frames import EnginePort
from specdec.replica.worker.role import Wire
from specdec.v1 import draft_pb2

WIRE = Wire(draft_pb2.DraftRequest, draft_pb2.DraftResponse, "draft session", "draft", joins_links=True)


def run_engine(port: EnginePort, settings: DraftSettings) -> None:
    """Entry of the process: runs until the servicer ends or says stop.

    Only one of the two branches is imported: drafters run without torch.
    """
    if settings.drafters:
        from specdec.draft_service.modelless.process import run_modelless

        run_modelless(port, settings, WIRE)
    else:
        from specdec.draft_service.model_process import run_model

        run_model(port, settings, WIRE)
