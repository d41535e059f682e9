"""The body of an engine process, the same for both roles: load, say so, loop; or say why not."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import structlog

from specdec.config import DraftSettings, TargetSettings
from specdec.engine.errors import EngineError, ModelLoadError, ModelNotSupported
from specdec.rpc.bridge.frames import EnginePort, FrameKind
from specdec.worker.build import BuiltEngine, build_engine
from specdec.worker.host import SessionHost
from specdec.worker.loop import EngineWorker
from specdec.worker.pending_responses import ResponseLimits
from specdec.worker.ranks import lead_ranks
from specdec.worker.role import Role, Wire
from specdec.worker.sessions import SessionT

_FLUSH_TIMEOUT_S = 2.0


def run_role(
    port: EnginePort,
    settings: TargetSettings | DraftSettings,
    wire: Wire,
    service: str,
    make_role: Callable[[SessionHost[SessionT], BuiltEngine], Role[SessionT]],
) -> None:
    """Load the model, announce it, and run the role until the servicer goes or says stop.

    With several ranks this process is rank 0, and starts the others, whose logs are those of ``service``-rank-N.
    Raises ``RankLost`` when one of them ends.
    """
    log = structlog.get_logger("specdec.worker")

    def report(reason: str) -> None:
        port.send(FrameKind.FATAL, payload=reason.encode())
        port.flush(_FLUSH_TIMEOUT_S)

    with contextlib.ExitStack() as stack:
        try:
            ranks = stack.enter_context(lead_ranks(settings, service, settings.log_level, settings.log_format, report))
            built = build_engine(settings, port, ranks)
            built.info.instance_id = port.instance_id
            identity = built.info.identity
            limits = ResponseLimits(settings.max_message_bytes, settings.stream_buffer_bytes)
            host = SessionHost[SessionT](port, wire, identity, settings.session_ttl_s, limits, port.steps)
            role = make_role(host, built)
        except (ModelNotSupported, ModelLoadError, EngineError) as error:
            report(str(error))
            return
        traces = settings.otlp_endpoint is not None
        worker = EngineWorker(port, wire, built.info, host, role, traces=traces, pulse=port.pulse)
        port.pulse.expect_turn(built.full_step_s)
        log.info("ready", model=identity.name, numerics_id=identity.numerics_id, row_invariant=identity.row_invariant)
        built.info.load.CopyFrom(role.load())
        gc.collect()
        gc.freeze()  # what the model brought stays for good: collections need not walk it between steps
        port.send(FrameKind.READY, payload=built.info.SerializeToString())
        worker.run()
        port.flush(_FLUSH_TIMEOUT_S)
