"""Build a coordinator from its settings, and run it from start to drain."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence

import grpc
import structlog
from prometheus_client import CollectorRegistry

from specdec import __version__
from specdec.config import CoordinatorSettings
from specdec.coordinator.connections import Connections
from specdec.coordinator.decode_loop import DecodeLoop
from specdec.coordinator.draft_relay import DraftRelay
from specdec.coordinator.finishing import Finisher
from specdec.coordinator.generation import GenerateCalls
from specdec.coordinator.intake.admission import AdmissionQueue
from specdec.coordinator.intake.callers import Callers
from specdec.coordinator.intake.conversions import Conversions
from specdec.coordinator.intake.load_shedding import LoadShedding
from specdec.coordinator.intake.planning import Planner
from specdec.coordinator.intake.reads.later_reads import LaterReads
from specdec.coordinator.intake.reads.pending_reads import PendingReads
from specdec.coordinator.intake.text_limits import TokenizingTurns
from specdec.coordinator.intake.validation import Limits
from specdec.coordinator.journal import Journal, JournalSettings
from specdec.coordinator.observer import Observer
from specdec.coordinator.open_inference import servicer as open_inference
from specdec.coordinator.recovery import DraftRecovery, TargetRecovery
from specdec.coordinator.recovery.hedging import Hedging
from specdec.coordinator.recovery.slowness import SlowTargets
from specdec.coordinator.recovery.watchdog import Watchdog
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.replicas.outliers import EjectionSettings
from specdec.coordinator.replicas.prefix_map import SharedPrefixes
from specdec.coordinator.replicas.registry_view import RegistryView
from specdec.coordinator.replicas.router import BLOCK_TOKENS, PrefixRouter
from specdec.coordinator.servicer import SERVICE_NAME, CoordinatorServicer
from specdec.coordinator.sessions.request_trace import RequestTracer
from specdec.coordinator.sessions.table import SessionTable
from specdec.coordinator.tasks import end_tasks
from specdec.coordinator.tenants.api_keys import ApiKeys, Authenticator, KeyFileInvalid
from specdec.coordinator.tenants.quotas import Allowance, QuotaRate, TenantLimits, TokenQuotas
from specdec.coordinator.tenants.shared_quotas import SharedQuotas
from specdec.coordinator.timings import Timings
from specdec.coordinator.vllm_engine import servicer as vllm_engine
from specdec.service.byte_budget import ByteBudget
from specdec.service.listening import StartupFailed
from specdec.service.memory_limit import budget_bytes, is_short
from specdec.service.server import run_service
from specdec.store.announcer import Announcer
from specdec.store.settings import open_store
from specdec.telemetry import BuildInfo, CoordinatorMetrics, CoordinatorPickerMetrics
from specdec.telemetry.tracing import Tracing
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff
from specdec.wire.errors import NotReady
from specdec.wire.tls_files import TlsFiles, TlsFilesBroken

_METHODS = {"standard": pb.REJECTION_SAMPLE_METHOD_STANDARD, "block": pb.REJECTION_SAMPLE_METHOD_BLOCK}
_MODES = {"coupled": pb.VERIFY_MODE_COUPLED, "rejection": pb.VERIFY_MODE_REJECTION}
_DRAIN_RETRY_S = 1.0
"""Seconds before a client's retry, so that its connection here ends and the next leads to another coordinator."""
_SHARED_JOURNAL_INTERVAL_S = 0.05
"""Seconds between writes to a shared store: another coordinator recomputes a few steps at most."""
_OWN_JOURNAL_INTERVAL_S = 2.0
"""Seconds between writes to a store in this process, which dies with it: no write is urgent."""
_COST_PER_BYTE = 12
"""Bytes of memory per byte of a request: its message, the texts and token ids in it, and its sessions. Measured at most
11 (60 requests of 15 MB, one tenant)."""
_READS_SHARE = 0.25
"""Part of the memory for requests that is for those being received."""
_MOST_HELD_BYTES = 256 * 2**20
"""Bytes of requests that a process holds, whatever its memory."""
_log = structlog.get_logger(__name__)


def held_bytes(num_processes: int) -> int:
    """Bytes of requests that may wait or run in each of the processes that share this one's memory limit."""
    return max(1, min(_MOST_HELD_BYTES, int(budget_bytes(num_processes) * (1 - _READS_SHARE)) // _COST_PER_BYTE))


class CoordinatorService:
    """A coordinator; `specdec.service.server.run_service` runs it."""

    name = "coordinator"
    grpc_names: Sequence[str] = (SERVICE_NAME, open_inference.SERVICE_NAME, vllm_engine.SERVICE_NAME)

    def __init__(
        self, settings: CoordinatorSettings, registry: CollectorRegistry, timings: Timings | None = None
    ) -> None:
        """Build all parts, in the order of their dependencies; start none. Raises TlsFilesBroken."""
        self._settings = settings
        timings = timings or Timings()
        self._tasks: list[asyncio.Task[None]] = []
        self._owner_id = settings.owner_id or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._observer = observer = Observer(CoordinatorMetrics(registry), _picker_metrics(settings, registry))
        self._tracing = Tracing(settings, self.name, settings.trace_sample_ratio)
        is_shared = settings.redis_url is not None
        self.store = open_store(settings, *observer.of_store(is_shared))
        self.registry_view = RegistryView(self.store) if is_shared else None
        self.announcer = self._build_announcer() if is_shared else None
        """Registers this process; None without redis_url."""
        self._shared_prefixes = SharedPrefixes(self.store, settings.prefix_ttl_s) if is_shared else None
        self._shared_quotas = SharedQuotas(self.store) if is_shared else None
        self._api_keys = None if settings.api_keys_file is None else ApiKeys(settings.api_keys_file)

        self._sessions = SessionTable()
        self._finisher = Finisher(self._sessions, observer)
        self._journal = self._build_journal(is_shared)
        self.fleet = Fleet(
            PrefixRouter(shared=self._shared_prefixes),
            settings.tokenizer,
            EjectionSettings(settings.ejection_failures, timings.ejection_s, timings.ejection_max_s),
            allow_mixed_numerics=settings.allow_mixed_numerics,
        )
        self._gate = LoadShedding(settings.shed_speculation_after_s)
        hedging = Hedging(
            sessions=self._sessions,
            fleet=self.fleet,
            observer=observer,
            share=settings.draft_hedge_share,
            is_overloaded=lambda: self._gate.is_shedding,
        )
        drafts = DraftRecovery(
            sessions=self._sessions,
            fleet=self.fleet,
            observer=observer,
            hedging=hedging,
            reopen_s=timings.draft_reopen_s,
        )
        targets = TargetRecovery(
            sessions=self._sessions,
            drafts=drafts,
            fleet=self.fleet,
            finisher=self._finisher,
            observer=observer,
            timeout_s=settings.target_timeout_s,
            backoff=Backoff(timings.reconnect_first_s, settings.reconnect_backoff_max_s, timings.retry_spread),
        )
        self._decode_loop = DecodeLoop(
            sessions=self._sessions,
            journal=self._journal,
            observer=observer,
            finisher=self._finisher,
            credit_window_tokens=settings.credit_window_tokens,
            on_progress=targets.on_progress,
            on_desync=targets.on_desync,
            on_bad_draft=drafts.on_bad_draft,
            drafts=DraftRelay(
                observer=observer,
                path=settings.proposal_path,
                stall_s=timings.draft_stall_s,
                on_bad_draft=drafts.on_bad_draft,
                on_draft=drafts.on_draft,
                on_hedged=drafts.on_hedged,
            ),
            on_verified=drafts.on_verified,
        )
        self._watchdog = Watchdog(
            sessions=self._sessions,
            fleet=self.fleet,
            moves=targets.moves,
            slow=SlowTargets(self.fleet),
            stall_s=settings.session_stall_s,
            timeout_s=settings.target_timeout_s,
        )
        self.connections = Connections(
            settings=settings,
            timings=timings,
            owner_id=self._owner_id,
            targets=targets,
            drafts=drafts,
            decode_loop=self._decode_loop,
            registry=self.registry_view,
            own_address=lambda: "" if self.announcer is None else self.announcer.address,
        )
        self._admission = AdmissionQueue(
            settings.max_running,
            settings.max_waiting,
            settings.queue_timeout_s,
            self._on_admission,
            self.fleet.capacity,
        )
        self._turns = TokenizingTurns()
        total_bytes = settings.max_held_prompt_bytes or held_bytes(1)
        self._prompt_bytes = ByteBudget(
            total_bytes,
            settings.max_held_prompt_bytes_per_tenant or max(1, total_bytes // 4),
            observer.metrics.admission_rejects.labels("prompt_bytes").inc,
        )
        self._generator = self._build_generator()
        reads_bytes = int(total_bytes * _COST_PER_BYTE * _READS_SHARE / (1 - _READS_SHARE))
        callers = Callers(
            Authenticator(self._api_keys, self._default_allowance()),
            settings.request_read_s,
            self._prompt_bytes,
            PendingReads(reads_bytes, settings.max_message_bytes),
            LaterReads(reads_bytes // settings.max_message_bytes, is_short),
        )
        self._open_inference = open_inference.OpenInferenceServicer(
            generator=self._generator, fleet=self.fleet, callers=callers, prompt_bytes=self._prompt_bytes
        )
        self._vllm_engine = vllm_engine.VllmEngineServicer(
            generator=self._generator,
            fleet=self.fleet,
            admission=self._admission,
            limits_of=self.limits,
            callers=callers,
            prompt_bytes=self._prompt_bytes,
        )
        self._servicer = CoordinatorServicer(
            generator=self._generator,
            fleet=self.fleet,
            admission=self._admission,
            limits_of=self.limits,
            default_mode=_MODES[settings.verify_mode],
            callers=callers,
            owner_id=self._owner_id,
            degraded=self.degraded,
            registry=self.registry_view,
            conversions=Conversions(
                fleet=self.fleet,
                limits_of=self.limits,
                turns=self._turns,
                prompt_bytes=self._prompt_bytes,
                max_message_bytes=settings.max_message_bytes,
            ),
        )

    def register(self, server: grpc.aio.Server) -> None:
        """See `Service.register`."""
        self._servicer.register(server)
        self._open_inference.register(server)
        self._vllm_engine.register(server)

    async def start(self) -> None:
        """Connect to all replicas; returns when a target has answered, even without drafts."""
        self._load_api_keys()
        self._journal.start()
        if self._shared_quotas is not None:
            self._shared_quotas.start()
        self.connections.open()
        self._tasks.append(asyncio.create_task(self._watchdog.run(), name="watchdog"))
        if self._shared_prefixes is not None:
            self._tasks.append(asyncio.create_task(self._shared_prefixes.run(), name="prefixes"))
        await self.fleet.wait_served()
        self._observer.metrics.processes.set(1)

    async def wait_failed(self) -> str:
        """Never returns: links reconnect for ever, and a coordinator works without the store."""
        await asyncio.Event().wait()
        return "unreachable"

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and let running ones end; the rest fail and can be resumed elsewhere."""
        self._generator.is_draining = True
        self._observer.metrics.processes.set(0)
        ends_s = time.monotonic() + timeout_s
        while self._sessions.requests and time.monotonic() < ends_s:
            await self._sessions.wait_ended(ends_s - time.monotonic())
        for request in self._sessions.requests:
            error = NotReady("the coordinator is shutting down", retry_after_s=_DRAIN_RETRY_S, reason="DRAINING")
            self._finisher.fail(request, error)
            request.end_wait()
        await asyncio.sleep(0)

    async def stop(self) -> None:
        """Close all links and the store, and export the remaining traces."""
        await end_tasks(self._tasks)
        self._turns.close()
        await self.connections.close()
        await self._journal.close()
        if self._shared_quotas is not None:
            await self._shared_quotas.close()
        await self.store.close()
        await self._tracing.close()

    def tls_uses(self) -> dict[str, TlsFiles | None]:
        """The TLS files in use besides the server's."""
        return {
            "replicas": self.connections.tls_files,
            "redis": self.store.tls_files,
            "otlp": self._tracing.tls_files,
        }

    def degraded(self) -> list[str]:
        """Descriptions of degraded functions, for people."""
        if self.store.is_up:
            return []
        return [
            f"Redis does not answer: {self._journal.num_unjournalled} running requests are not in the journal, and "
            "each coordinator checks request ids, quotas and concurrency alone"
        ]

    def limits(self, identity: pb.ModelIdentity) -> Limits:
        """Limits of clients' requests for a model."""
        settings = self._settings
        return Limits(
            vocab_size=identity.vocab_size,
            max_model_len=identity.max_model_len,
            max_tokens=min(settings.max_tokens_limit or identity.max_model_len, identity.max_model_len),
            refuses_excess_tokens=settings.excess_max_tokens == "refuse",
            max_choices=settings.max_choices,
            max_stop_strings=settings.max_stop_strings,
            max_stop_string_bytes=settings.max_stop_string_bytes,
            max_logprobs=settings.max_logprobs,
            max_logit_bias=settings.max_logit_bias,
            max_prompt_bytes=settings.max_prompt_bytes,
            eos_token_ids=frozenset(identity.eos_token_ids),
            defaults=identity.sampling_defaults,
            max_draft_tokens=settings.max_draft_tokens,
            knows_constraints=bool(identity.constraints_id),
            trusts_chat_templates=settings.trust_request_chat_template,
        )

    def _on_admission(self, num_running: int, num_waiting: int) -> None:
        self._observer.admission(num_running, num_waiting)
        self._gate.on_queue(num_waiting)

    def _default_allowance(self) -> Allowance:
        settings = self._settings
        return Allowance(
            max_prompt_tokens=settings.max_prompt_tokens,
            max_concurrent_requests=settings.max_concurrent_requests_per_tenant,
            quota=QuotaRate.of(settings.quota_tokens_per_s, settings.quota_burst_tokens),
        )

    def _load_api_keys(self) -> None:
        if self._api_keys is None:
            return
        try:
            self._api_keys.load()
        except KeyFileInvalid as error:
            raise StartupFailed(f"api_keys_file: {self._settings.api_keys_file} {error}") from error
        if not self._settings.serves_tls:
            _log.warning("api_keys_without_tls", note="keys travel unencrypted: set tls_dir")

    def _build_journal(self, is_shared: bool) -> Journal:
        settings = JournalSettings(
            lease_s=self._settings.journal_lease_s,
            keep_s=self._settings.journal_keep_s,
            interval_s=_SHARED_JOURNAL_INTERVAL_S if is_shared else _OWN_JOURNAL_INTERVAL_S,
        )
        return Journal(
            self.store,
            self._owner_id,
            settings,
            on_unjournalled=self._observer.metrics.unjournalled.set,
            on_taken_over=self._finisher.take_over,
            on_aborted=self._finisher.abort,
        )

    def _build_announcer(self) -> Announcer:
        return Announcer(self.store, self._settings.registry_ttl_s, self.name, self._owner_id, self._describe)

    def _describe(self) -> pb.GetReplicaInfoResponse:
        served = self.fleet.served
        return pb.GetReplicaInfoResponse(
            identity=None if served is None else served.identity,
            load=pb.LoadReport(num_running=self._admission.num_running, num_waiting=self._admission.num_waiting),
            version=__version__,
            instance_id=self._owner_id,
        )

    def _build_planner(self) -> Planner:
        secret = self._settings.resume_secret
        key = secret.get_secret_value().encode() if secret is not None else secrets.token_bytes(32)
        return Planner(
            fleet=self.fleet,
            journal=self._journal,
            limits_of=self.limits,
            default_mode=_MODES[self._settings.verify_mode],
            default_method=_METHODS[self._settings.rejection_sample_method],
            resume_secret=key,
            turns=self._turns,
            max_message_bytes=self._settings.max_message_bytes,
        )

    def _build_generator(self) -> GenerateCalls:
        settings = self._settings
        rejects = self._observer.metrics.admission_rejects
        return GenerateCalls(
            owner_id=self._owner_id,
            fleet=self.fleet,
            sessions=self._sessions,
            admission=self._admission,
            tenant_limits=TenantLimits(self._shared_quotas or TokenQuotas(), lambda cause: rejects.labels(cause).inc()),
            decode_loop=self._decode_loop,
            finisher=self._finisher,
            journal=self._journal,
            observer=self._observer,
            planner=self._build_planner(),
            speculate=settings.speculate,
            target_timeout_s=settings.target_timeout_s,
            reader_stall_s=settings.reader_stall_s,
            prompt_bytes=self._prompt_bytes,
            gate=self._gate,
            tracer=RequestTracer(self._tracing, settings.trace_content),
            logs_access=settings.access_log,
        )


def _picker_metrics(settings: CoordinatorSettings, registry: CollectorRegistry) -> CoordinatorPickerMetrics | None:
    if not settings.picker_metrics:
        return None
    picker = CoordinatorPickerMetrics(registry)
    picker.block_size.labels(BLOCK_TOKENS, "").set(1)
    return picker


async def run_coordinator(
    settings: CoordinatorSettings, *, shares_port: bool = False, on_serving: Callable[[], None] | None = None
) -> int:
    """Run a coordinator in this process until a signal or a failure ends it; returns the exit code.

    See `specdec.service.server.run_service` for the arguments.
    """
    registry = CollectorRegistry()
    BuildInfo(registry, "coordinator")
    try:
        service = CoordinatorService(settings, registry)
    except TlsFilesBroken as error:
        _log.error("startup_failed", reason=str(error))
        return 1
    return await run_service(
        service,
        settings,
        registry=registry,
        announcer=service.announcer,
        shares_port=shares_port,
        on_serving=on_serving,
        tls_uses=service.tls_uses,
    )
