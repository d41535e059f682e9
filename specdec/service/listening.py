"""Addresses that a process listens on, over IPv4 and IPv6: one host for gRPC, health and metrics. And those to call."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import ExitStack
from typing import Any

# A name such as localhost may resolve to an address family that the machine lacks.
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_NAME_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
"""Schemes of names that gRPC resolves itself."""


class StartupFailed(Exception):
    """The service cannot start; the message names the setting and the cause."""


def is_wildcard(host: str) -> bool:
    """Whether a host, with or without brackets, means all addresses of the machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def bound_sockets(host: str, port: int, *options: int) -> list[socket.socket]:
    """Bind sockets to all addresses of a host and one port, a free one for port 0. No socket listens yet.

    The addresses equal gRPC's: a wildcard in either form is one socket for IPv4 and IPv6, if the kernel has both. Sets
    `options` of SOL_SOCKET to 1. Raises OSError if an address is not available.
    """
    missing: OSError | None = None
    with ExitStack() as undo:
        sockets: list[socket.socket] = []
        for family, address in _addresses(host, port):
            at = (address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:])
            try:
                sockets.append(undo.enter_context(_bound(family, at, options)))
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                missing = error
        if not sockets and missing is not None:
            raise missing
        undo.pop_all()
        return sockets


def why_not_bound(host: str, port: int) -> str:
    """Why a server cannot listen on a port, in the kernel's words, which gRPC keeps for its own log; "" if it can."""
    try:
        for probe in bound_sockets(host, port, socket.SO_REUSEADDR):
            probe.close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    if is_wildcard(host):
        has_both = socket.has_dualstack_ipv6()
        return [(socket.AF_INET6, ("::", port)) if has_both else (socket.AF_INET, ("0.0.0.0", port))]
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bound(family: int, address: tuple[Any, ...], options: tuple[int, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            made.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def is_server_address(address: str) -> bool:
    """Whether gRPC can call an address: host:port, or a name with one of gRPC's schemes. A URL is none."""
    if address.startswith(_NAME_SCHEMES):
        return True
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 2**16
