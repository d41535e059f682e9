"""The /metrics page of a process."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from specdec.rpc.settings import ServiceSettings
from specdec.rpc.startup import StartupFailed
from specdec.rpc.tls import TlsFiles, follow_files, server_tls_files
from specdec.telemetry import scrape_registry


@contextlib.contextmanager
def metrics_endpoint(settings: ServiceSettings, registry: CollectorRegistry) -> Iterator[int | None]:
    """Serve /metrics where the settings say; yields the port, None if metrics are off. Raises StartupFailed.

    A wildcard address stands for IPv4 and IPv6, as it does for gRPC.
    """
    if settings.metrics_port is None:
        yield None
        return
    tls = server_tls_files(settings) if settings.metrics_tls else None
    try:
        server = _start_metrics(settings.metrics_port, settings, scrape_registry(registry), tls)
    except OSError as error:
        address = f"{settings.host}:{settings.metrics_port}"
        raise StartupFailed(f"metrics_port: cannot listen on {address}: {error.strerror}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _start_metrics(
    port: int, settings: ServiceSettings, registry: CollectorRegistry, tls: TlsFiles | None
) -> WSGIServer:
    if settings.host == "0.0.0.0":
        try:
            return _start_on("::", port, settings, registry, tls)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    return _start_on(settings.host, port, settings, registry, tls)


def _start_on(
    host: str, port: int, settings: ServiceSettings, registry: CollectorRegistry, tls: TlsFiles | None
) -> WSGIServer:
    if tls is None:
        return start_http_server(port, host, registry)[0]
    client_ca = settings.tls_client_ca_file
    server, _ = start_http_server(
        port, host, registry,
        certfile=str(settings.tls_cert_file),
        keyfile=str(settings.tls_key_file),
        client_cafile=None if client_ca is None else str(client_ca),
        client_auth_required=client_ca is not None,
    )  # fmt: skip
    follow_files(server, tls)
    return server
