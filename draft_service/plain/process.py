"""The engine process of a draft without a model: asks the target for its tokenizer and limits, then proposes."""

from __future__ import annotations

import structlog
from prometheus_client import REGISTRY

from specdec import __version__
from specdec.config import DraftSettings
from specdec.config.drafter_options import OpenAiApiOptions
from specdec.draft_service.plain.recorder import PlainRecorder
from specdec.draft_service.plain.role import PlainDrafting
from specdec.draft_service.plain.session import PlainSession
from specdec.draft_service.target_facts import NoTargetFacts, TargetFacts, ask_target
from specdec.drafting.endpoints.drafter import OpenAiApi
from specdec.drafting.interface import Drafter
from specdec.drafting.registry import make_drafter
from specdec.replica.bridge.frames import EnginePort
from specdec.replica.worker.entry import make_host, report_fatal, serve
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.role import Wire
from specdec.telemetry import DraftMetrics
from specdec.v1 import common_pb2 as pb
from specdec.wire.tls_files import TlsFilesBroken


def run_plain(port: EnginePort, settings: DraftSettings, wire: Wire) -> None:
    """Propose until the servicer ends or says stop."""
    try:
        facts = ask_target(settings)
        drafters = [_make(options, facts) for options in settings.drafters]
    except (NoTargetFacts, TlsFilesBroken, ValueError) as error:
        report_fatal(port, str(error))
        return
    info = pb.GetReplicaInfoResponse(
        identity=_identity(settings, facts.identity),
        version=__version__,
        max_message_bytes=settings.max_message_bytes,
        drafters=[drafter.name for drafter in drafters],
    )
    host: SessionHost[PlainSession] = make_host(port, settings, wire, info)
    role = PlainDrafting(host, drafters, info.identity, settings, PlainRecorder(DraftMetrics(REGISTRY)))
    structlog.get_logger("specdec.draft").info("plain_draft", drafters=list(info.drafters), target=settings.target)
    serve(port, settings, wire, info, host, role)


def _make(options: object, facts: TargetFacts) -> Drafter:
    if isinstance(options, OpenAiApiOptions):
        return OpenAiApi(options, facts.tokenizer_json)
    return make_drafter(options)  # type: ignore[arg-type]


def _identity(settings: DraftSettings, target: pb.ModelIdentity) -> pb.ModelIdentity:
    """The drafters' identity: the target's tokenizer, ids and context; no weights."""
    return pb.ModelIdentity(
        name=settings.served_name,
        architecture="drafters",
        tokenizer_digest=target.tokenizer_digest,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        eos_token_ids=target.eos_token_ids,
        device="none",
    )
