"""Client channels: the same limits, keepalive and TLS for every connection between services."""

from __future__ import annotations

import grpc

from specdec.wire.settings import PeerSettings, WireSettings
from specdec.wire.tls import channel_credentials, replica_tls_files
from specdec.wire.tls_files import TlsFiles, TlsMaterial

_MAX_RECONNECT_BACKOFF_MS = 2000
_MIN_RECONNECT_BACKOFF_MS = 100
_CONNECT_ATTEMPT_MS = 5000
"""Milliseconds of an attempt to connect, at least: a busy peer needs more than a second to answer."""


def wire_options(settings: WireSettings) -> list[tuple[str, int]]:
    """gRPC options that clients and servers share: message limits and keepalive."""
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        # The receiver decides, with RESOURCE_EXHAUSTED; a sender's own limit would end a stream as INTERNAL.
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", round(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        # A keepalive ping times out after the longer of its own time-out and this one, by default a minute.
        ("grpc.http2.ping_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # By default gRPC stops after two pings without data; idle streams must notice a dead peer too.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_channel(address: str, settings: PeerSettings, tls: TlsMaterial | None = None) -> grpc.aio.Channel:
    """A channel to host:port; connects lazily and reconnects by itself, at most two seconds apart.

    It uses no HTTP proxy, and shares its connection with no other channel. Where the settings demand TLS, the channel
    keeps `tls` for its lifetime; without `tls` the files are read now. Raises TlsFilesBroken, which names the setting,
    where they cannot be used.
    """
    options: list[tuple[str, int | str]] = [
        *wire_options(settings),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", _MIN_RECONNECT_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_ATTEMPT_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
    ]
    if tls is None and (files := replica_tls_files(settings)) is not None:
        tls = files.current()
    if tls is None or not settings.replica_tls:
        return grpc.aio.insecure_channel(address, options=options)
    if settings.replica_tls_server_name:
        options.append(("grpc.ssl_target_name_override", settings.replica_tls_server_name))
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


class ReplicaChannel:
    """The channel to one replica, which `renew` exchanges for one with the TLS files as they are now.

    A gRPC channel in Python keeps the certificate with which it was opened, even when it reconnects after the
    certificate has expired.
    """

    def __init__(self, address: str, settings: PeerSettings, files: TlsFiles | None = None) -> None:
        """Open the channel. `files` are the settings' TLS files, one object for all replicas; None without TLS."""
        self._address = address
        self._settings = settings
        self._files = files
        self._tls = None if files is None else files.current()
        self.current = open_channel(address, settings, self._tls)
        """The channel for new calls."""

    async def renew(self) -> bool:
        """Exchange the channel, and end its calls, if the files have changed; returns whether they have."""
        latest = None if self._files is None else self._files.current()
        if latest is self._tls:
            return False
        former, self.current = self.current, open_channel(self._address, self._settings, latest)
        self._tls = latest
        await former.close()
        return True

    async def close(self) -> None:
        """Close the channel; its calls are cancelled."""
        await self.current.close()
