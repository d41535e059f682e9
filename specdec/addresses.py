"""How addresses are written in settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator


def _check_address(address: str) -> str:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return address


Address = Annotated[str, BeforeValidator(_check_address)]
"""host:port, or dns:///name:port where a setting says so."""
