"""Client channels: the same limits, keepalive and TLS for every connection between services."""

from __future__ import annotations

import grpc

from specdec.rpc.settings import ClientSettings, WireSettings
from specdec.rpc.tls import channel_credentials

_MAX_RECONNECT_BACKOFF_MS = 2000
_MIN_RECONNECT_BACKOFF_MS = 100


def wire_options(settings: WireSettings) -> list[tuple[str, int]]:
    """gRPC options that clients and servers share: message limits and keepalive."""
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        # The receiver decides: it answers RESOURCE_EXHAUSTED, where a sender's own limit ends a stream as
        # INTERNAL.
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", round(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # gRPC would stop pinging after two pings without data; idle streams must notice a dead peer too.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_channel(address: str, settings: ClientSettings) -> grpc.aio.Channel:
    """A channel to host:port; connects lazily and reconnects by itself, at most two seconds apart.

    Never goes through an HTTP proxy, and shares its connection with no other channel. TLS files are read
    once, here; raises TlsFilesBroken, which names the setting, when they cannot be used.
    """
    options: list[tuple[str, int | str]] = [
        *wire_options(settings),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", _MIN_RECONNECT_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", _MIN_RECONNECT_BACKOFF_MS * 10),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
    ]
    credentials = _credentials(settings)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if settings.replica_tls_server_name:
        options.append(("grpc.ssl_target_name_override", settings.replica_tls_server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def check_client_tls(settings: ClientSettings) -> None:
    """Raises TlsFilesBroken, which names the setting, when TLS files for channels cannot be used."""
    _credentials(settings)


def _credentials(settings: ClientSettings) -> grpc.ChannelCredentials | None:
    if not settings.replica_tls:
        return None
    return channel_credentials(
        settings.replica_tls_ca_file, settings.replica_tls_cert_file, settings.replica_tls_key_file
    )
