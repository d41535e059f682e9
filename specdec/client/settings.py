"""How a client reaches coordinators: settings of its channel and its calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import grpc
from google.protobuf import descriptor
from google.protobuf.message import Message
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specdec.service.listening import is_server_address
from specdec.v1 import coordinator_pb2
from specdec.wire.backoff import Backoff
from specdec.wire.errors import InvalidRequest

# Waits between attempts to connect. gRPC's own grow to two minutes, in which a coordinator that is back is not noticed.
# These are shorter than a call's attempts together: a coordinator that is back is found before all attempts are used.
_FIRST_RECONNECT_MS = 100
_LONGEST_RECONNECT_MS = 1000

# gRPC itself retries calls that were refused or never reached a server, unless the server forbids it (see
# specdec.wire.abort). A stopping server ends calls it has not read as CANCELLED. A stream is retried only before its
# first chunk, so no token comes twice.
MOST_ATTEMPTS = 5
RETRY_WAITS = Backoff(first_s=0.1, longest_s=2.0, spread=(0.8, 1.2))
"""Waits between the attempts, as gRPC draws them: in seconds."""
RETRY_POLICY = {
    "maxAttempts": MOST_ATTEMPTS,
    "initialBackoff": f"{RETRY_WAITS.first_s:g}s",
    "maxBackoff": f"{RETRY_WAITS.longest_s:g}s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
_MOST_S = {
    "timeout_s": 10**9,
    "keepalive_s": 2 * 10**6,
    "keepalive_timeout_s": 2 * 10**6,
    "connect_timeout_s": 2 * 10**6,
}
"""Seconds, at most: gRPC takes a later deadline for one that has passed, and counts other times in ms of 31 bits."""
_MOST_BYTES = 2**31 - 1
"""Bytes of a message, at most: gRPC counts them in 31 bits."""
_METADATA_NAME = re.compile(r"[0-9a-z_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How to reach the coordinator. Times in seconds."""

    timeout_s: float | None = None
    """Deadline of one call, None: no deadline. The server learns it and stops working for a call that has passed it."""
    keepalive_s: float = 3.0
    """Pings a silent server after this time, while calls run. Coordinators accept one ping per second; a proxy may
    accept fewer, and then closes the connection."""
    keepalive_timeout_s: float = 3.0
    """Time for the answer to a ping; after it the server counts as gone, and its calls end UNAVAILABLE."""
    connect_timeout_s: float = 5.0
    """Time to connect to one address before the next is tried."""
    retries: bool = True
    """gRPC calls again, at the same address, where no answer had begun. If that server is frozen, this takes
    `connect_timeout_s` more: a caller that knows other coordinators asks those instead."""
    max_message_bytes: int = 16 * 1024 * 1024
    unread_bytes: int | None = None
    """Bytes of one stream that may wait unread in this process, about; None: as many as the connection's speed and
    delay suggest to gRPC, which may be megabytes. What waits holds up a connection's other streams."""
    authority: str | None = None
    """name:port that the server is called by, and that its certificate must have; None: the address."""
    tls: bool = False
    """Use TLS. The certificates below turn it on, too."""
    root_certificates: bytes | None = None
    """PEM authorities of the server's certificate; None: those that gRPC trusts (its own list, or the file in
    GRPC_DEFAULT_SSL_ROOTS_FILE_PATH)."""
    client_certificate: tuple[bytes, bytes] | None = None
    """PEM key and certificate chain, for mutual TLS."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Sent with every call. Names are lower case, values printable ASCII."""
    api_key: str | None = field(default=None, repr=False)
    """Sent with every call, as `authorization: Bearer KEY`; without TLS it travels unencrypted."""

    def __post_init__(self) -> None:
        """Raise InvalidRequest for what gRPC would take for a call that is late, or for a connection that failed."""
        for name, most_s in _MOST_S.items():
            value_s = getattr(self, name)
            if value_s is not None and not 0 < value_s <= most_s:
                raise InvalidRequest(name, f"{value_s} is not above 0 s and at most {most_s:.0f} s")
        if not 0 < self.max_message_bytes <= _MOST_BYTES:
            raise InvalidRequest("max_message_bytes", f"{self.max_message_bytes} is outside 1..{_MOST_BYTES}")
        for name, value in self.metadata:
            if not _METADATA_NAME.fullmatch(name):
                raise InvalidRequest("metadata", f"{name!r} has other characters than a to z, 0 to 9, _, . and -")
            if not (name.endswith("-bin") or (value.isascii() and value.isprintable())):
                raise InvalidRequest("metadata", f"the value of {name} is not printable ASCII")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidRequest("api_key", "has characters that no HTTP header carries, such as a line break")

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call, including the span in OpenTelemetry's current context."""
        own = () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)
        trace: dict[str, str] = {}
        if all(name != "traceparent" for name, _ in self.metadata):
            TraceContextTextMapPropagator().inject(trace)
        return (*self.metadata, *own, *trace.items())

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a TLS channel; None without TLS."""
        if not (self.tls or self.root_certificates or self.client_certificate):
            return None
        key, chain = self.client_certificate or (None, None)
        return grpc.ssl_channel_credentials(self.root_certificates, key, chain)

    def check_size(self, request: Message) -> None:
        """Raise InvalidRequest if a request is larger than `max_message_bytes`."""
        # gRPC itself would answer RESOURCE_EXHAUSTED, which suggests a retry.
        num_bytes, most = request.ByteSize(), self.max_message_bytes
        if num_bytes > most:
            raise InvalidRequest("request", f"{num_bytes} bytes exceed the limit of {most} (max_message_bytes)")

    def channel_options(self) -> list[tuple[str, str | int]]:
        """Options of the gRPC channel: retries, keepalive, message limits."""
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        unread: list[tuple[str, str | int]] = []
        if self.unread_bytes is not None:
            unread = [("grpc.http2.lookahead_bytes", self.unread_bytes), ("grpc.http2.bdp_probe", 0)]
        authority: list[tuple[str, str | int]] = []
        if self.authority is not None:
            authority = [("grpc.default_authority", self.authority)]
        return [
            *unread,
            *authority,
            ("grpc.service_config", service_config(service)),
            ("grpc.enable_retries", int(self.retries)),
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            # gRPC waits for the longer of the keepalive's time-out and this one, by default a minute.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            # By default only two pings are sent until the client sends data, and long streams only read.
            ("grpc.http2.max_pings_without_data", 0),
            # A server that accepts connections but never answers would hold each attempt for 20 s.
            ("grpc.min_reconnect_backoff_ms", round(self.connect_timeout_s * 1000)),
            ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", _LONGEST_RECONNECT_MS),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
        ]


def check_address(address: str) -> None:
    """Raise InvalidRequest if gRPC cannot call an address: it would tell of a server that is down."""
    if not is_server_address(address):
        raise InvalidRequest("address", f"{address!r} is not host:port")


def service_config(service: descriptor.ServiceDescriptor) -> str:
    """Return gRPC's service config: round robin over a name's addresses, and retries."""
    return json.dumps(
        {
            "loadBalancingConfig": [{"round_robin": {}}],
            "methodConfig": [{"name": [{"service": service.full_name}], "retryPolicy": RETRY_POLICY}],
        }
    )
