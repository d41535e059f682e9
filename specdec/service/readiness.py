"""Report a process's state: health at its own port and at one without TLS, and in the registry."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specdec.service.listening import StartupFailed, why_not_bound
from specdec.service.settings import ServiceSettings
from specdec.store.announcer import AnnouncedState, Announcer
from specdec.wire.settings import join_address


class Readiness:
    """The health of all gRPC services of a process and of the empty name, and its state in the registry."""

    def __init__(self, names: Sequence[str], announcer: Announcer | None = None) -> None:
        self._names = ("", *names)
        self._announcer = announcer
        self._servicers: list[health.aio.HealthServicer] = []
        self._status: int = health_pb2.HealthCheckResponse.NOT_SERVING
        self._is_shut_down = False

    async def register(self, server: grpc.aio.Server) -> None:
        """Answer health checks at a server."""
        servicer = health.aio.HealthServicer()
        self._servicers.append(servicer)
        for name in self._names:
            await servicer.set(name, self._status)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)

    async def set_serving(self, is_serving: bool) -> None:
        """Report SERVING or NOT_SERVING; no effect after `shut_down`."""
        if self._is_shut_down:
            return
        self._announce(AnnouncedState.READY if is_serving else AnnouncedState.LOADING)
        response = health_pb2.HealthCheckResponse
        self._status = response.SERVING if is_serving else response.NOT_SERVING
        for servicer in self._servicers:
            for name in self._names:
                await servicer.set(name, self._status)

    async def shut_down(self) -> None:
        """Report NOT_SERVING for good."""
        self._is_shut_down = True
        self._announce(AnnouncedState.DRAINING)
        for servicer in self._servicers:
            await servicer.enter_graceful_shutdown()

    def _announce(self, state: AnnouncedState) -> None:
        if self._announcer is not None:
            self._announcer.set_state(state)


@contextlib.asynccontextmanager
async def plaintext_health(settings: ServiceSettings, readiness: Readiness) -> AsyncIterator[int | None]:
    """Serve health at `health_port`; yields the port, None if it is off. Raises StartupFailed."""
    if settings.health_port is None:
        yield None
        return
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    await readiness.register(server)
    address = join_address(settings.host, settings.health_port)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        cause = why_not_bound(settings.host, settings.health_port) or error
        raise StartupFailed(f"health_port: cannot listen on {address}: {cause}") from error
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)
