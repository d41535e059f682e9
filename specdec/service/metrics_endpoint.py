"""The /metrics page of a process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry

from specdec.service.listening import StartupFailed, bound_sockets
from specdec.service.metrics_server import MetricsServer
from specdec.telemetry import scrape_registry
from specdec.wire.settings import join_address
from specdec.wire.tls import ServesTls, server_tls_files
from specdec.wire.tls_files import TlsFiles


class ServesMetrics(ServesTls, Protocol):
    """Settings with a page of metrics."""

    @property
    def host(self) -> str: ...

    @property
    def metrics_port(self) -> int | None: ...

    @property
    def metrics_tls(self) -> bool: ...


@contextlib.contextmanager
def metrics_endpoint(
    settings: ServesMetrics, registry: CollectorRegistry, tls: TlsFiles | None = None
) -> Iterator[int | None]:
    """Serve /metrics at `metrics_port`; yields the port, None if metrics are off. Raises StartupFailed.

    `tls`: the server's files if the caller has them; `metrics_tls` uses them here, too.
    """
    if settings.metrics_port is None:
        yield None
        return
    tls = (tls or server_tls_files(settings)) if settings.metrics_tls else None
    try:
        listeners = bound_sockets(settings.host, settings.metrics_port, socket.SO_REUSEADDR)
        servers = [MetricsServer(listener, scrape_registry(registry), tls) for listener in listeners]
    except OSError as error:
        address = join_address(settings.host, settings.metrics_port)
        raise StartupFailed(f"metrics_port: cannot listen on {address}: {error.strerror}") from error
    for server in servers:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield servers[0].server_port
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
