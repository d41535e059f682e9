"""The life of a service process: listen, start, serve, drain, stop.

listening    gRPC, health (NOT_SERVING), reflection and /metrics answer; calls get UNAVAILABLE with RetryInfo
ready        Service.start returned (for a replica: the model is loaded and warmed); health is SERVING
draining     SIGTERM, SIGINT or SIGHUP: health is NOT_SERVING, Service.drain lets running work end
stopped      open calls are cut off after a grace period; a second signal, a second later or more, leads here at once

A process that shares its port with others listens only once it is ready, because the kernel gives connections to any
process that listens.

With a shared store the process registers there as loading, ready and draining.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import grpc
import structlog
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from specdec import __version__
from specdec.service import open_files
from specdec.service.error_interceptor import ErrorInterceptor
from specdec.service.listening import StartupFailed, is_wildcard, why_not_bound
from specdec.service.metrics_endpoint import metrics_endpoint
from specdec.service.process import ending_signals
from specdec.service.readiness import Readiness, plaintext_health
from specdec.service.settings import ServiceSettings
from specdec.service.tls_watch import TlsUses, TlsWatch
from specdec.store.announcer import Announcer
from specdec.telemetry import TlsMetrics
from specdec.wire.channel import wire_options
from specdec.wire.settings import join_address
from specdec.wire.tls import ClientNameInterceptor, server_credentials, server_tls_files
from specdec.wire.tls_files import TlsFiles, TlsFilesBroken

_MIN_PEER_PING_INTERVAL_MS = 1000
_HANDSHAKE_MS = 20_000
"""Milliseconds for TLS and the first HTTP/2 frames before a silent connection is closed; gRPC's default is 2 min."""
SECOND_SIGNAL_S = 1.0
"""Seconds after the first signal in which others count as the same: who ends a group signals its services twice."""
_MOST_STREAMS = 4096
"""Calls of one connection at once, at most, as many as a gateway has; calls that were reset count until freed."""
_LEAST_PENDING, _MOST_PENDING = 2 * _MOST_STREAMS, 4 * _MOST_STREAMS
"""Calls not yet taken up from which gRPC cancels new ones of all connections, at random and always; its defaults are
1000 and 3000, which one connection reaches."""
# Seconds beyond the drain's own limit, so that a hanging drain cannot hold the process.
_DRAIN_MARGIN_S = 5.0
# Seconds for which calls that have already arrived are refused with a reason after a drain, whose end keeps the event
# loop busy: a stopping server cancels calls that it has not read.
_REFUSING_S = 0.1
_log = structlog.get_logger(__name__)
SetServing = Callable[[bool], Awaitable[None]]


class Service(Protocol):
    """A service that run_service can run."""

    @property
    def name(self) -> str:
        """Short name for logs: coordinator, target or draft."""

    @property
    def grpc_names(self) -> Sequence[str]:
        """Full names of its gRPC services, for health and reflection."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add its handlers. They answer NotReady until `start` has returned."""

    async def start(self) -> None:
        """Become ready. Raises StartupFailed. May be cancelled."""

    async def wait_failed(self) -> str:
        """Wait until the service can no longer work; returns the reason. It runs from the beginning of `start`."""

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, wait at most `timeout_s` for running work, end the rest with a status."""

    async def stop(self) -> None:
        """Release everything. Called once, also after errors."""


def build_server(
    settings: ServiceSettings, tls: TlsFiles | None, *, shares_port: bool = False
) -> tuple[grpc.aio.Server, int]:
    """A server that is not started, and its port; it is bound unless it shares that port.

    It has keepalive, message limits and typed statuses for errors, and TLS with `tls`. Raises StartupFailed, which
    names the setting, if the port cannot be used.
    """
    options: list[tuple[str, int]] = [
        *wire_options(settings.wire_to_callers()),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PEER_PING_INTERVAL_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PEER_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_concurrent_streams", _MOST_STREAMS),
        ("grpc.server.max_pending_requests", _LEAST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
        # gRPC's default is on: two servers would silently share one port's connections.
        ("grpc.so_reuseport", int(shares_port)),
    ]
    interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
    if settings.tls_allowed_client_names:
        interceptors.append(ClientNameInterceptor(settings.tls_allowed_client_names, settings.draft_names))
    server = grpc.aio.server(
        interceptors=interceptors, options=options, maximum_concurrent_rpcs=settings.most_concurrent_calls
    )
    return server, settings.port if shares_port else _bind(server, settings, tls)


async def run_service(
    service: Service,
    settings: ServiceSettings,
    *,
    registry: CollectorRegistry | None = None,
    announcer: Announcer | None = None,
    shares_port: bool = False,
    on_serving: Callable[[], None] | None = None,
    tls_uses: TlsUses = dict,
    watch_serving: Callable[[SetServing], None] | None = None,
) -> int:
    """Run a service until a signal or a failure ends it; returns the process's exit code (0 or 1).

    Logs `listening` with the ports, and `ready` once health is SERVING.

    Args:
        service: the service.
        settings: its settings.
        registry: shown at /metrics if metrics are not in multiprocess mode.
        announcer: registers the process from listening to stopped.
        shares_port: other processes of ours may have the same port.
        on_serving: called once, when health is SERVING.
        tls_uses: TLS files besides the server's, for metrics.
        watch_serving: gets the callback that the service calls when it cannot work for a while, and when it can again.
    """
    open_files.raise_limit()
    stopping = asyncio.Event()
    aborting = asyncio.Event()
    failure = asyncio.create_task(service.wait_failed())
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(service.stop)
            tls = server_tls_files(settings)
            server, port = build_server(settings, tls, shares_port=shares_port)
            readiness = Readiness(service.grpc_names, announcer)
            await readiness.register(server)
            service.register(server)
            if settings.serves_reflection:
                names = (*service.grpc_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
                reflection.enable_server_reflection(names, server)
            install_signals(stopping, aborting)
            if watch_serving is not None:
                watch_serving(readiness.set_serving)
            if not shares_port:
                await server.start()
            stack.push_async_callback(server.stop, 0)
            registry = registry or CollectorRegistry()
            metrics_port = stack.enter_context(metrics_endpoint(settings, registry, tls))
            watch = TlsWatch(TlsMetrics(registry), lambda: {"server": tls, **tls_uses()})
            stack.callback(asyncio.create_task(watch.run(), name="tls-watch").cancel)
            stack.callback(asyncio.create_task(open_files.watch(), name="open-files").cancel)
            health_port = await stack.enter_async_context(plaintext_health(settings, readiness))
            _log.info(
                "starting" if shares_port else "listening", host=settings.host, port=port, metrics_port=metrics_port,
                health_port=health_port, tls=settings.serves_tls, version=__version__,
            )  # fmt: skip
            remedy = "tls_dir with tls_verify_clients, network policies, for coordinators api_keys_file"
            settings.warn_if_open(has_keys=settings.has_keys, remedy=remedy)
            if announcer is not None:
                announcer.start(advertised_address(settings, port))
                stack.push_async_callback(announcer.stop)

            async def on_started() -> None:
                if shares_port:
                    _bind(server, settings, tls)
                    await server.start()
                await readiness.set_serving(True)
                if on_serving is not None:
                    on_serving()

            exit_code = await _serve(service, on_started, failure, stopping)
            await readiness.shut_down()
            if exit_code == 0:
                await _drain(service, settings.drain_s, aborting, failure)
            _log.info("stopping", exit_code=exit_code)
            if not exit_code:
                await asyncio.sleep(_REFUSING_S)
            await server.stop(0 if aborting.is_set() or exit_code else settings.stop_grace_s)
            return exit_code
    except (StartupFailed, TlsFilesBroken) as error:
        _log.error("startup_failed", reason=str(error))
        return 1
    finally:
        failure.cancel()


def advertised_address(settings: ServiceSettings, port: int) -> str:
    """host:port at which others reach a process that listens on `port`."""
    if settings.advertise_address is not None:
        return settings.advertise_address
    return join_address(socket.gethostname() if is_wildcard(settings.host) else settings.host, port)


async def _serve(
    service: Service, on_started: Callable[[], Awaitable[None]], failure: asyncio.Task[str], stopping: asyncio.Event
) -> int:
    """Serve until a signal (0) or a failure (1)."""
    stop = asyncio.create_task(stopping.wait())
    start = asyncio.create_task(service.start())
    try:
        await asyncio.wait({start, stop, failure}, return_when=asyncio.FIRST_COMPLETED)
        if start.done() and not stop.done():
            try:
                await start
            except OSError as error:  # files, memory or process numbers are short
                raise StartupFailed(str(error)) from error
            await on_started()
            _log.info("ready")
            await asyncio.wait({stop, failure}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return 0
        _log.error("failed", reason=failure.result())
        return 1
    finally:
        for task in (start, stop):
            task.cancel()
        await asyncio.gather(start, stop, return_exceptions=True)


async def _drain(service: Service, drain_s: float, aborting: asyncio.Event, failure: asyncio.Task[str]) -> None:
    _log.info("draining", drain_s=drain_s)
    drain = asyncio.create_task(service.drain(drain_s))
    abort = asyncio.create_task(aborting.wait())
    await asyncio.wait({drain, abort, failure}, timeout=drain_s + _DRAIN_MARGIN_S, return_when=asyncio.FIRST_COMPLETED)
    if drain.done() and drain.exception() is not None:
        _log.error("drain_failed", exc_info=drain.exception())
    for task in (drain, abort):
        task.cancel()


def install_signals(stopping: asyncio.Event, aborting: asyncio.Event) -> None:
    """Let the first SIGTERM, SIGINT or SIGHUP set `stopping`, and those that come `SECOND_SIGNAL_S` after it or later
    `aborting`. nohup's SIGHUP is ignored."""
    loop = asyncio.get_running_loop()
    first_s: float | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_s
        _log.info("signal", signal=number.name)
        if first_s is None:
            first_s = loop.time()
            stopping.set()
        elif loop.time() - first_s >= SECOND_SIGNAL_S:
            aborting.set()

    for number in (signal.SIGINT, *ending_signals()):
        loop.add_signal_handler(number, on_signal, number)


def _bind(server: grpc.aio.Server, settings: ServiceSettings, tls: TlsFiles | None) -> int:
    address = join_address(settings.host, settings.port)
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, server_credentials(tls))
    except (RuntimeError, ValueError) as error:
        cause = why_not_bound(settings.host, settings.port) or error
        raise StartupFailed(f"host, port: cannot listen on {address}: {cause}") from error
