"""Addresses at which programs call a server."""

from __future__ import annotations

_NAME_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
"""Schemes of names that gRPC resolves itself."""


def is_server_address(address: str) -> bool:
    """Whether gRPC can call an address: host:port, or a name with one of gRPC's schemes. A URL is none."""
    if address.startswith(_NAME_SCHEMES):
        return True
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 2**16
