"""The servicer process of a target or draft: starts the engine, relays its streams, reports its model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import structlog
from prometheus_client import CollectorRegistry

from specdec import __version__
from specdec.config import DraftSettings, ReplicaSettings
from specdec.engine.settings import leads_nowhere
from specdec.replica.bridge.engine_keeper import EngineKeeper
from specdec.replica.bridge.engine_process import EngineProcess
from specdec.replica.bridge.link_dialer import LinkDialer
from specdec.replica.bridge.stream_relay import RelayedCall, StreamRelay
from specdec.service.listening import StartupFailed
from specdec.service.process import split_cores
from specdec.service.server import SetServing, run_service
from specdec.service.settings import ReplicaServiceSettings
from specdec.store.announcer import Announcer
from specdec.store.guarded import GuardedStore
from specdec.store.settings import open_store
from specdec.telemetry import (
    BuildInfo,
    RelayMetrics,
    enable_multiprocess_metrics,
    forget_gauges_of,
    metrics_folder,
    setup_logging,
)
from specdec.telemetry.tracing import Tracing
from specdec.v1 import common_pb2
from specdec.wire.errors import NotReady, PermissionDenied
from specdec.wire.message_sizes import most_bytes, most_entry_bytes, text_pieces
from specdec.wire.tls_files import TlsFiles, TlsFilesBroken

TOKENIZER_PIECE_BYTES = 1024 * 1024
_ENGINE_STOP_S = 5.0
"""Seconds that the engine may take to stop before it is killed."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ReplicaRole:
    """The differences between a target's and a draft's servicer."""

    name: str
    """Name in logs and metrics."""
    grpc_name: str
    """Full name of the gRPC service."""
    stream_method: str
    """Its bidirectional method, relayed without parsing."""
    engine_entry: str
    """module:function that the engine process runs."""
    serves_tokenizer: bool
    """Whether the service has GetTokenizer."""
    link_method: str | None = None
    """Its bidirectional method for drafts; None: it has none."""
    engine_method: str | None = None
    """Its unary method that the engine answers, relayed without parsing; None: it has none."""


class ReplicaService:
    """A replica's gRPC service; a specdec.service.server.Service."""

    def __init__(self, role: ReplicaRole, settings: ReplicaServiceSettings, registry: CollectorRegistry) -> None:
        self.name = role.name
        self.grpc_names = (role.grpc_name,)
        self._role = role
        self._settings = settings
        try:
            engine_cores, self._cores = split_cores(settings.engine_cores, os.sched_getaffinity(0))
        except ValueError as error:
            raise StartupFailed(str(error)) from error
        self._tracing = Tracing(settings, role.name)
        metrics = RelayMetrics(registry, role.name)
        self._dialer: LinkDialer | None = None
        if isinstance(settings, DraftSettings) and settings.link_targets:
            self._dialer = LinkDialer(settings, metrics)
        self._keeper = EngineKeeper(
            lambda: EngineProcess(
                role.engine_entry,
                settings,
                service=f"{role.name}-engine",
                cores=engine_cores,
                on_session_span=self._tracing.record,
                on_look=metrics.engine_silence.set,
                on_dial=None if self._dialer is None else self._dialer.dial,
            ),
            load_timeout_s=settings.load_timeout_s,
            max_restarts=settings.most_engine_restarts,
            metrics=metrics,
            on_ready=self._on_ready,
            on_exit=forget_gauges_of,
        )
        self._set_serving: SetServing | None = None
        self._relay = StreamRelay(lambda: self._keeper.engine, metrics, settings.stream_buffer_bytes, self._not_ready)
        self._links = StreamRelay(
            lambda: self._keeper.engine, metrics, settings.stream_buffer_bytes, self._not_ready, is_link=True
        )
        self._store: GuardedStore | None = None
        self.announcer: Announcer | None = None
        """Registers this process; None without redis_url."""
        if settings.redis_url is not None:
            self._store = open_store(settings, on_change=metrics.store_up.set)
            self.announcer = Announcer(
                self._store, settings.registry_ttl_s, role.name, self._keeper.engine.instance_id,
                self._describe, metrics.announce_failures.inc,
            )  # fmt: skip

    def register(self, server: grpc.aio.Server) -> None:
        """Add the handlers."""
        handlers: dict[str, grpc.RpcMethodHandler] = {
            self._role.stream_method: grpc.stream_stream_rpc_method_handler(self._relay.handle),
            "GetReplicaInfo": grpc.unary_unary_rpc_method_handler(
                self._get_replica_info,
                request_deserializer=common_pb2.GetReplicaInfoRequest.FromString,
                response_serializer=common_pb2.GetReplicaInfoResponse.SerializeToString,
            ),
        }
        if self._role.serves_tokenizer:
            handlers["GetTokenizer"] = grpc.unary_stream_rpc_method_handler(
                self._get_tokenizer,
                request_deserializer=common_pb2.GetTokenizerRequest.FromString,
                response_serializer=common_pb2.GetTokenizerResponse.SerializeToString,
            )
        if self._role.link_method is not None:
            handlers[self._role.link_method] = grpc.stream_stream_rpc_method_handler(self._links.handle)
        if self._role.engine_method is not None:
            called = self._call_engine if self._settings.trusts_network else _refuse_strangers
            handlers[self._role.engine_method] = grpc.unary_unary_rpc_method_handler(called)
        generic = grpc.method_handlers_generic_handler(self._role.grpc_name, handlers)
        server.add_generic_rpc_handlers((generic,))

    async def start(self) -> None:
        """Start the engine and wait until the model is loaded and warmed up. Raises StartupFailed."""
        starting = asyncio.create_task(self._keeper.start())
        await asyncio.sleep(0)  # the engine inherits its cores, so it starts before this process is pinned
        _pin_all_threads(self._cores)
        info = await starting
        info.version = info.version or __version__
        identity = info.identity
        _log.info(
            "model_ready", model=identity.name, numerics_id=identity.numerics_id, device=identity.device,
            row_invariant=identity.row_invariant, kv_blocks=info.load.kv_blocks_total,
        )  # fmt: skip

    async def wait_failed(self) -> str:
        """Wait until the engine cannot be kept running; returns the reason."""
        return await self._keeper.wait_failed()

    def watch_serving(self, set_serving: SetServing) -> None:
        """Set the callback for restarts: called with False at the engine's end, with True when it is ready again."""
        self._set_serving = set_serving

    async def drain(self, timeout_s: float) -> None:
        """Wait until no session is left, then end the streams, so that coordinators move on."""
        is_empty = await self._keeper.drain(timeout_s)
        _log.info("drained" if is_empty else "drain_timed_out")
        for relay in (self._relay, self._links):
            relay.end_streams(NotReady("the replica is shutting down", reason="DRAINING"))

    async def stop(self) -> None:
        """Stop the engine process, and export the remaining traces."""
        await self._keeper.stop(_ENGINE_STOP_S)
        if self._dialer is not None:
            await self._dialer.close()
        await self._tracing.close()
        if self._store is not None:
            await self._store.close()

    def tls_uses(self) -> dict[str, TlsFiles | None]:
        """The TLS files in use besides the server's."""
        return {
            "redis": None if self._store is None else self._store.tls_files,
            "otlp": self._tracing.tls_files,
        }

    async def _on_ready(self, is_ready: bool) -> None:
        if self.announcer is not None:
            self.announcer.set_instance(self._keeper.engine.instance_id)
        if self._set_serving is not None:
            await self._set_serving(is_ready)

    def _not_ready(self) -> NotReady:
        """Attach the last engine's end, which a coordinator that lost its stream may have missed."""
        error = NotReady("the model is loading")
        error.attached.append(self._keeper.last_end)
        return error

    def _describe(self) -> common_pb2.GetReplicaInfoResponse:
        return self._keeper.engine.info or common_pb2.GetReplicaInfoResponse(version=__version__)

    async def _get_replica_info(
        self, _request: common_pb2.GetReplicaInfoRequest, _context: grpc.aio.ServicerContext
    ) -> common_pb2.GetReplicaInfoResponse:
        engine = self._keeper.engine
        if engine.info is None or not engine.is_ready:
            raise self._not_ready()
        engine.info.last_end.CopyFrom(self._keeper.last_end)
        return engine.info

    async def _call_engine(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        engine = self._keeper.engine
        if not engine.is_ready:
            raise self._not_ready()
        return await RelayedCall(engine).run(request, context)

    async def _get_tokenizer(
        self, request: common_pb2.GetTokenizerRequest, _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerResponse]:
        engine = self._keeper.engine
        if not engine.is_ready:
            raise NotReady("the model is loading")
        limit = most_bytes(request.max_message_bytes, self._settings.max_message_bytes)
        # A message has a piece of each.
        piece_bytes = min(TOKENIZER_PIECE_BYTES, most_entry_bytes(limit) // 2)
        content = engine.tokenizer_json()
        configs = text_pieces(engine.tokenizer_config, piece_bytes)
        for start in range(0, max(len(content), 1), piece_bytes):
            piece = content[start : start + piece_bytes]
            yield common_pb2.GetTokenizerResponse(tokenizer_json=piece, tokenizer_config=next(configs, ""))
        for config in configs:
            yield common_pb2.GetTokenizerResponse(tokenizer_config=config)


async def _refuse_strangers(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
    raise PermissionDenied(
        "everybody who reaches this port could change how the replica works: set tls_verify_clients (with tls_dir), or "
        "allow_unauthenticated where only trusted callers reach it"
    )


def run_replica(role: ReplicaRole, settings: ReplicaServiceSettings) -> int:
    """Run a replica until a signal or a failure ends it; returns the exit code."""
    setup_logging(role.name, settings.log_level, settings.log_format)
    with metrics_folder() as directory:
        enable_multiprocess_metrics(directory)
        return asyncio.run(_run(role, settings))


async def _run(role: ReplicaRole, settings: ReplicaServiceSettings) -> int:
    registry = CollectorRegistry()
    try:
        # An engine would find it after its imports, which take seconds.
        if isinstance(settings, ReplicaSettings) and leads_nowhere(settings.model):
            raise StartupFailed(f"model: no such directory: {settings.model}")
        service = ReplicaService(role, settings, registry)
    except (StartupFailed, TlsFilesBroken) as error:
        _log.error("startup_failed", reason=str(error))
        return 1
    BuildInfo(registry, role.name)
    return await run_service(
        service, settings, registry=registry, announcer=service.announcer, tls_uses=service.tls_uses,
        watch_serving=service.watch_serving,
    )  # fmt: skip


def _pin_all_threads(cores: frozenset[int] | None) -> None:
    """Pin every thread: affinity is per thread, and gRPC has already started some."""
    if cores is None:
        return
    for thread_id in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread_id), cores)
        except ProcessLookupError:
            continue
