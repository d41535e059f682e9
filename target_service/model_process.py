"""The engine process of a target with a model."""

from __future__ import annotations

from prometheus_client import REGISTRY

from specdec.config import TargetSettings
from specdec.drafting.heads.footprint import footprint
from specdec.drafting.role.metrics import DraftRecorder
from specdec.replica.bridge.frames import EnginePort
from specdec.replica.worker.build import BuiltEngine, run_role
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.role import Wire
from specdec.target_service.proposals.own_draft import build_own_draft
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.session import TargetSession
from specdec.target_service.verifier import Verifier
from specdec.telemetry import DraftMetrics, TargetMetrics


def run_model(port: EnginePort, settings: TargetSettings, wire: Wire) -> None:
    """Verify until the servicer closes the port or sends stop."""
    recorder = TargetRecorder(TargetMetrics(REGISTRY))
    draft = settings.own_draft_settings
    draft_recorder = None if draft is None else DraftRecorder(DraftMetrics(REGISTRY))

    def make_role(host: SessionHost[TargetSession], built: BuiltEngine, settings: TargetSettings) -> Verifier:
        own = None
        if draft is not None and draft_recorder is not None:
            own, identity = build_own_draft(host, built, draft, draft_recorder)
            built.info.own_draft.CopyFrom(identity)
        verifier = Verifier(host, built, settings, recorder, own)
        built.info.drafters.extend(verifier.local_drafters.names)
        built.info.drafter_options.extend(verifier.local_drafters.told_options)
        return verifier

    run_role(port, settings, wire, "target-engine", make_role, heads=footprint(settings.drafters))
