"""The draft's engine process."""

from __future__ import annotations

from specdec.config import DraftSettings
from specdec.replica.bridge.frames import EnginePort


def run_engine(port: EnginePort, settings: DraftSettings) -> None:
    """Entry of the process: runs until the servicer ends or says stop.

    Only one of the two branches is imported: drafters run without torch.
    """
    if settings.drafters:
        from specdec.draft_service.plain.process import run_plain
        from specdec.draft_service.wire import WIRE

        run_plain(port, settings, WIRE)
    else:
        from specdec.draft_service.model_process import run_model

        run_model(port, settings)
