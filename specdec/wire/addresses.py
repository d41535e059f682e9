"""Addresses in settings and on the wire: host:port."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator


def check_address(address: str) -> str:
    """Return an address unchanged. Raises ValueError where it is not host:port."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    if host.count(":") > 1 and not host.endswith("]"):
        raise ValueError(f"{address!r}: an IPv6 address is written in brackets, such as [::1]:50052")
    return address


def join_address(host: str, port: int) -> str:
    """host:port; an IPv6 address gets brackets unless it has them."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


Address = Annotated[str, BeforeValidator(check_address)]
"""host:port, or dns:///name:port where a setting allows it."""
