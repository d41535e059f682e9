"""The engine process of a draft with a model."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY

from specdec.config import DraftSettings
from specdec.drafting.role.drafter import ModelDrafter
from specdec.drafting.role.metrics import DraftRecorder
from specdec.drafting.text.drafter import TextDrafter
from specdec.drafting.translation.build import Translated, translate
from specdec.engine.errors import ModelLoadError
from specdec.replica.bridge.frames import EnginePort
from specdec.replica.worker.build import BuiltEngine, run_role
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.role import Role, Wire
from specdec.telemetry import DraftMetrics
from specdec.wire.tls_files import TlsFilesBroken


def run_model(port: EnginePort, settings: DraftSettings, wire: Wire) -> None:
    """Draft until the servicer ends or says stop."""
    recorder = DraftRecorder(DraftMetrics(REGISTRY))
    texts: list[Translated] = []

    def adapt(built: BuiltEngine) -> BuiltEngine:
        translated = _translated(built, settings)
        if translated is None:
            return built
        if translated.method == "text":
            texts.append(translated)
        return translated.built

    def make_role(host: SessionHost[Any], built: BuiltEngine, settings: DraftSettings) -> Role[Any]:
        if texts:
            return TextDrafter(host, texts[0], settings, recorder)
        return ModelDrafter(host, built, settings, recorder)

    run_role(port, settings, wire, "draft-engine", make_role, adapt)


def _translated(built: BuiltEngine, settings: DraftSettings) -> Translated | None:
    """The adapter between the draft's tokenizer and the target's; None if no target is set or none is needed."""
    if settings.target is None:
        return None
    from specdec.draft_service.target_facts import NoTargetFacts, ask_target  # imports gRPC

    try:
        facts = ask_target(settings)
    except (NoTargetFacts, TlsFilesBroken) as error:
        raise ModelLoadError(str(error)) from error
    return translate(
        built, facts.identity, facts.tokenizer_json, settings.heterogeneous_vocab, settings.max_message_bytes
    )
