"""Addresses given to commands. It imports nothing, because a container runs `specdec health` every few seconds."""

from __future__ import annotations

DEFAULT_ADDRESS = "127.0.0.1:50051"
_NAME_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
"""Schemes of names that gRPC resolves itself."""


def check_address(address: str) -> str:
    """Return the address. Raises ValueError if it is neither host:port nor a name that gRPC resolves."""
    host, _, port = address.rpartition(":")
    if not address.startswith(_NAME_SCHEMES) and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"{address!r} is not HOST:PORT")
    return address
