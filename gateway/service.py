"""Build a gateway from its settings, and run it: listen, serve, drain, stop.

listening    /version and /metrics answer; /health says 503 until a coordinator serves
draining     SIGTERM, SIGINT or SIGHUP: /health says 503, new requests are refused, running ones go on
stopped      requests that run after drain_s are cut off; a second signal leads here at once
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import structlog
from prometheus_client import CollectorRegistry

from specdec import __version__
from specdec.client import Client, ClientSettings
from specdec.gateway.app import build_app, build_health_app
from specdec.gateway.http.body import BodyLimits, BodyReader
from specdec.gateway.http.edge import Edge
from specdec.gateway.http.methods import answering_head, with_origins
from specdec.gateway.http.places import Places
from specdec.gateway.http.server import HttpServer
from specdec.gateway.openness import Openness
from specdec.gateway.parser_names import ParserNames
from specdec.gateway.parts import Parts
from specdec.gateway.routes.answers import error_response
from specdec.gateway.settings import GatewaySettings
from specdec.gateway.upstream.coordinators import Coordinators, Health
from specdec.gateway.upstream.hold import Hold
from specdec.service import open_files
from specdec.service.byte_budget import ByteBudget
from specdec.service.listening import StartupFailed, bound_sockets
from specdec.service.memory_limit import budget_bytes
from specdec.service.metrics_endpoint import metrics_endpoint
from specdec.service.server import install_signals
from specdec.service.tls_watch import INTERVAL_S, TlsWatch
from specdec.telemetry import BuildInfo, GatewayMetrics, PickerMetrics, TlsMetrics, VllmMetrics
from specdec.telemetry.tracing import Tracing
from specdec.wire.discovery import ReplicaAddress
from specdec.wire.settings import client_tls_paths
from specdec.wire.tls import server_tls_files
from specdec.wire.tls_files import TlsFiles, TlsFilesBroken, client_context

_COST_PER_BYTE = 4
"""Bytes of memory per byte of a body or an answer."""
_UNREAD_BYTES = 16 * 1024
"""Bytes of an answer that a coordinator may send ahead of its HTTP client's reading: readers that read nothing would
otherwise fill the one connection with megabytes each, behind which all other streams wait."""
_MOST_HELD_BYTES = 2**30
_log = structlog.get_logger(__name__)


class Gateway:
    """A gateway. It needs a running event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Build all parts; nothing listens yet. Raises TlsFilesBroken."""
        self._settings = settings
        self._registry = registry = CollectorRegistry()
        BuildInfo(registry, "gateway")
        self._server_tls = server_tls_files(settings)
        self._coordinator_tls = _coordinator_tls(settings)
        self._tracing = Tracing(settings, "gateway", settings.trace_sample_ratio)
        metrics = GatewayMetrics(registry)
        self._coordinators = Coordinators(
            self._connect, settings.coordinators_of, metrics.failovers.inc, settings.shares
        )
        models = self._coordinators.models
        # Without holding there are no series: by them alerts know deployments whose models may be away.
        by_model = {model: metrics.held.labels(model) for model in models if settings.hold_s > 0}
        hold = Hold(settings.hold_s, settings.max_held_requests, by_model)
        self._health = Health(self._coordinators, hold)
        self.parts = Parts(
            settings=settings,
            coordinators=self._coordinators,
            health=self._health,
            reader=BodyReader(
                BodyLimits(settings.max_body_bytes, settings.body_read_s),
                ignores_unknown=settings.unknown_fields == "ignore",
            ),
            registry=registry,
            metrics=metrics,
            vllm=VllmMetrics(registry),
            picker=PickerMetrics(registry),
            parser_names={model: ParserNames(settings.reasoning_parser, settings.tool_parser) for model in models},
            openness=Openness(settings, self._coordinators),
        )
        most_bytes = settings.max_held_body_bytes or min(_MOST_HELD_BYTES, max(1, budget_bytes() // _COST_PER_BYTE))
        self.edge = Edge(
            answering_head(build_app(self.parts)),
            metrics=metrics,
            health=self._health,
            tracing=self._tracing,
            places=Places(settings.max_concurrent_requests),
            budget=ByteBudget(most_bytes, max(1, most_bytes // 4)),
            logs_access=settings.access_log,
            answer=error_response,
        )
        times: dict[str, float] = {"header_s": settings.header_read_s, "reader_stall_s": settings.reader_stall_s}
        served = with_origins(self.edge, settings.cors_origins)
        self._server = HttpServer(served, tls=self._server_tls, **times)
        self._probed = HttpServer(answering_head(build_health_app(self.parts)), tls=None, **times)
        self._endpoints = contextlib.ExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0
        """Port of the HTTP server, once it listens."""
        self.metrics_port: int | None = None
        """Further port of its metrics; None: none."""
        self.health_port: int | None = None
        """Plaintext port of its probes; None: none."""

    async def start(self) -> None:
        """Listen. Raises StartupFailed."""
        settings = self._settings
        sockets = self._bound("port", settings.port)
        probed = [] if settings.health_port is None else self._bound("health_port", settings.health_port)
        endpoint = metrics_endpoint(settings, self._registry, self._server_tls)
        self.metrics_port = self._endpoints.enter_context(endpoint)
        self.port = sockets[0].getsockname()[1]
        await self._coordinators.reach()
        await self._server.start(sockets)
        if probed:
            self.health_port = probed[0].getsockname()[1]
            await self._probed.start(probed)
        uses = {"server": self._server_tls, "coordinators": self._coordinator_tls}
        watch = TlsWatch(TlsMetrics(self._registry), lambda: uses)
        self._tasks.append(asyncio.create_task(watch.run(), name="tls-watch"))
        self._tasks.append(asyncio.create_task(open_files.watch(), name="open-files"))
        self._tasks.append(asyncio.create_task(self._coordinators.keep_finding(), name="names"))
        if self._coordinator_tls is not None:
            self._tasks.append(asyncio.create_task(self._renew(self._coordinator_tls), name="tls-renewal"))
        _log.info(
            "listening", host=settings.host, port=self.port, metrics_port=self.metrics_port,
            health_port=self.health_port, tls=self._server_tls is not None, version=__version__,
        )  # fmt: skip
        self._tasks.append(asyncio.create_task(self.parts.openness.run(), name="openness"))
        self._tasks.append(asyncio.create_task(self._coordinators.watch(), name="deaf"))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let running ones end, and cut off the rest after `timeout_s`."""
        self._health.drain()
        _log.info("draining", drain_s=timeout_s, num_running=self.edge.num_running)
        try:
            async with asyncio.timeout(timeout_s):
                await self.edge.wait_idle()
        except TimeoutError:
            _log.warning("requests_cut_off", num_requests=self.edge.num_running)
            self.edge.cut_off()

    async def stop(self, grace_s: float) -> None:
        """Close everything. Call it once, also after errors."""
        self._health.drain()
        await self._server.stop(grace_s)
        await self._probed.stop(0)
        self.parts.reader.close()
        self._endpoints.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._coordinators.close()
        await self._tracing.close()

    def _bound(self, name: str, port: int) -> list[socket.socket]:
        try:
            return bound_sockets(self._settings.host, port, socket.SO_REUSEADDR)
        except OSError as error:
            raise StartupFailed(f"host, {name}: cannot listen on {self._settings.host}:{port}: {error}") from error

    def _connect(self, found: ReplicaAddress) -> Client:
        settings, files = self._settings, self._coordinator_tls
        tls = None if files is None else files.current()
        pair = None if tls is None or tls.key is None or tls.chain is None else (tls.key, tls.chain)
        port = found.address.rpartition(":")[2]
        return Client(
            found.address,
            ClientSettings(
                authority=None if found.server_name is None else f"{found.server_name}:{port}",
                keepalive_s=settings.keepalive_time_s,
                keepalive_timeout_s=settings.keepalive_timeout_s,
                retries=False,
                max_message_bytes=settings.max_message_bytes,
                unread_bytes=_UNREAD_BYTES,
                tls=settings.coordinator_tls,
                root_certificates=None if tls is None else tls.authorities,
                client_certificate=pair,
            ),
        )

    async def _renew(self, files: TlsFiles) -> None:
        """Replace connections when files have changed: gRPC's connections keep their first certificate."""
        used = files.current()
        while True:
            await asyncio.sleep(INTERVAL_S)
            latest = await asyncio.to_thread(files.current)
            if latest is not used:
                used = latest
                self._coordinators.renew()


async def run_gateway(settings: GatewaySettings) -> int:
    """Run a gateway in this process until a signal ends it; returns the exit code."""
    open_files.raise_limit()
    stopping, aborting = asyncio.Event(), asyncio.Event()
    install_signals(stopping, aborting)
    try:
        gateway = Gateway(settings)
    except TlsFilesBroken as error:
        _log.error("startup_failed", reason=str(error))
        return 1
    exit_code = 0
    try:
        await gateway.start()
        exit_code = await _until_stopped(gateway, stopping)
        drain = asyncio.create_task(gateway.drain(settings.drain_s))
        abort = asyncio.create_task(aborting.wait())
        await asyncio.wait({drain, abort}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, abort):
            task.cancel()
    except StartupFailed as error:
        _log.error("startup_failed", reason=str(error))
        exit_code = 1
    with contextlib.suppress(asyncio.CancelledError):
        await gateway.stop(0 if aborting.is_set() else settings.stop_grace_s)
    _log.info("stopping", exit_code=exit_code)
    return exit_code


async def _until_stopped(gateway: Gateway, stopping: asyncio.Event) -> int:
    """Wait for a signal (0), or until the gateway must not serve (1)."""
    refused = asyncio.create_task(gateway.parts.openness.refused())
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({refused, stop}, return_when=asyncio.FIRST_COMPLETED)
    is_refused = refused.done()
    if is_refused:
        _log.error("open_to_all", reason=refused.result())
    for task in (refused, stop):
        task.cancel()
    return int(is_refused)


def _coordinator_tls(settings: GatewaySettings) -> TlsFiles | None:
    if not settings.coordinator_tls:
        return None
    return TlsFiles(client_context, client_tls_paths(settings, "coordinator_tls"))
