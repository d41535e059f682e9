"""The engine process of a draft with a model."""

from __future__ import annotations

from prometheus_client import REGISTRY

from draft_service.wire import WIRE
from specdec.config import DraftSettings
from specdec.drafting.drafter import Drafter
from specdec.drafting.metrics import DraftRecorder
from specdec.drafting.translation.build import Translated, translate
from specdec.engine.errors import ModelLoadError
from specdec.rpc.bridge.frames import EnginePort
from specdec.telemetry import DraftMetrics
from specdec.tls_files import TlsFilesBroken
from specdec.worker.build import BuiltEngine, run_role


def run_model(port: EnginePort, settings: DraftSettings) -> None:
    """Draft until the servicer goes or says stop."""
    recorder = DraftRecorder(DraftMetrics(REGISTRY))

    def adapt(built: BuiltEngine) -> BuiltEngine:
        translated = _translated(built, settings)
        return built if translated is None else translated.built

    run_role(port, settings, WIRE, "draft-engine", lambda host, built: Drafter(host, built, settings, recorder), adapt)


def _translated(built: BuiltEngine, settings: DraftSettings) -> Translated | None:
    """What stands between the draft and the target of the settings; None where nothing has to."""
    if settings.target is None:
        return None
    from draft_service.target_facts import NoTargetFacts, ask_target  # gRPC, which engines do without mostly

    try:
        facts = ask_target(settings)
    except (NoTargetFacts, TlsFilesBroken) as error:
        raise ModelLoadError(str(error)) from error
    return translate(
        built, facts.identity, facts.tokenizer_json, settings.heterogeneous_vocab, settings.max_message_bytes
    )
