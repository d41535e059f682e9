"""Who may call a service: settings of the address it listens on, and what it does where anybody may."""

from __future__ import annotations

import ipaddress

import structlog
from pydantic import Field

from specdec.wire.settings import ServerTlsSettings

_log = structlog.get_logger(__name__)


class ExposureSettings(ServerTlsSettings):
    """Where a service listens, and which callers it must know."""

    host: str = Field(default="0.0.0.0", min_length=1, description="Address to listen on.")
    allow_unauthenticated: bool = Field(
        default=False,
        description="Trust everybody who reaches a port beyond loopback without a key and tls_verify_clients, as "
        "behind network policies. Without it such a gateway stops, such a target refuses SetDrafters, and nothing "
        "describes the service (reflection; the gateway's /openapi.json and /metrics).",
    )

    @property
    def trusts_network(self) -> bool:
        """Whether everybody who reaches the port is trusted: it is on loopback, checks certificates, or was told."""
        return is_loopback(self.host) or self.verifies_clients or self.allow_unauthenticated

    def warn_if_open(self, *, has_keys: bool, remedy: str) -> None:
        """Log one line if anybody who reaches the port may call."""
        if not (is_loopback(self.host) or self.verifies_clients or has_keys):
            risk = "whoever reaches this port may use it"
            _log.warning("open_to_all", host=self.host, risk=risk, remedy=remedy, allowed=self.allow_unauthenticated)


def is_loopback(host: str) -> bool:
    """Whether a host, with or without brackets, can only be reached from this machine. No name is resolved."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
