"""Causes of failed calls, as exit codes and in words. It imports no gRPC, which the health check over HTTP omits."""

from __future__ import annotations

from specdec.service.listening import is_server_address
from specdec.service.texts import fault_of

DEFAULT_ADDRESS = "127.0.0.1:50051"
_CONNECT_FAILURES = {
    "Connection refused": "no server listens there",
    "Domain name not found": "there is no such host",
    "errors resolving": "the host's name cannot be resolved",
    "Socket closed": "the server closed the connection: it needs TLS, or a client certificate that it accepts (its log "
    "says which)",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not from a trusted authority (--tls-ca)",
    "Hostname Verification": "the server's certificate is not for this host name",
    "Failed parsing HTTP/2": "the server there does not speak gRPC",
}
"""Causes in plain words, by a part of gRPC's message."""

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CODES = {
    "INVALID_ARGUMENT": EXIT_USAGE,
    "NOT_FOUND": 3,
    "ALREADY_EXISTS": 4,
    "RESOURCE_EXHAUSTED": 5,
    "UNAVAILABLE": 6,
    "DEADLINE_EXCEEDED": 7,
    "CANCELLED": 8,
    "FAILED_PRECONDITION": 9,
    "DATA_LOSS": 10,
    "UNAUTHENTICATED": 11,
    "PERMISSION_DENIED": 11,
}
"""Exit codes by the name of gRPC's status."""


def check_server_address(address: str) -> str:
    """Return the address. Raises ValueError if it is neither host:port nor a name that gRPC resolves."""
    if (fault := fault_of(address)) is not None:
        raise ValueError(f"{address!r} {fault}")
    if not is_server_address(address):
        raise ValueError(f"{address!r} is not HOST:PORT")
    return address


def connect_failure(message: str) -> str | None:
    """Return why gRPC could not connect, in plain words; None if its message has another subject."""
    return next((words for sign, words in _CONNECT_FAILURES.items() if sign in message), None)
