"""How the command reports errors: the typed error and its fields, no traceback, one exit code per cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import typer
from rich.console import Console
from rich.text import Text

from specdec.commands.views.shown import harmless
from specdec.wire.errors import InvalidRequest, Overloaded, SpecdecError, Unavailable

_CONNECT_FAILURES = {
    "Connection refused": "nothing listens there",
    "Domain name not found": "there is no such host",
    "errors resolving": "the host's name cannot be resolved",
    "Socket closed": "the server closed the connection: it wants TLS, or a client certificate that it accepts (its log "
    "says which)",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate does not come from an authority that is trusted "
    "here (--tls-ca)",
    "Hostname Verification": "the server's certificate is not for this host name",
    "Failed parsing HTTP/2": "what listens there is no gRPC server",
}
"""What gRPC says of a connection that does not come about, and what it means."""

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: EXIT_USAGE,
    grpc.StatusCode.NOT_FOUND: 3,
    grpc.StatusCode.ALREADY_EXISTS: 4,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 5,
    grpc.StatusCode.UNAVAILABLE: 6,
    grpc.StatusCode.DEADLINE_EXCEEDED: 7,
    grpc.StatusCode.CANCELLED: 8,
    grpc.StatusCode.FAILED_PRECONDITION: 9,
    grpc.StatusCode.DATA_LOSS: 10,
    grpc.StatusCode.UNAUTHENTICATED: 11,
    grpc.StatusCode.PERMISSION_DENIED: 11,
}


class ClusterFailed(Exception):
    """A service did not start, or ended by itself; the message says which, why, and where its log is."""


@contextmanager
def reported_errors(console: Console, address: str = "", role: str = "coordinator") -> Iterator[None]:
    """Print typed errors that pass through and leave with their exit code; `address` is what was called, if any, and
    `role` what should listen there.
    """
    try:
        yield
    except SpecdecError as error:
        console.print(describe(error, address, role))
        raise typer.Exit(EXIT_CODES.get(error.code, EXIT_FAILURE)) from None
    except ClusterFailed as error:
        console.print(Text.assemble(("error: ", "bold red"), str(error)))
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def connect_failure(message: str) -> str | None:
    """Return why gRPC could not connect, in plain words; None when that is not what its message is about."""
    return next((words for sign, words in _CONNECT_FAILURES.items() if sign in message), None)


def describe(error: SpecdecError, address: str = "", role: str = "coordinator") -> Text:
    """Return the error as text: code, reason, field, message, when to try again."""
    text = Text.assemble(("error: ", "bold red"), (error.code.name, "red"))
    if error.reason != error.code.name:
        text.append(f" ({error.reason})", style="red")
    message = harmless(error.message)
    if address and error.reason == Unavailable.default_reason and (failure := connect_failure(error.message)):
        text.append(f"\n  cannot connect to {address}: {failure}")
        text.append(f"\n  {message}", style="dim")
        return text
    if address and error.code is grpc.StatusCode.UNIMPLEMENTED:
        text.append(f"\n  {address} does not know the call: what listens there is no {role}")
        return text
    if isinstance(error, InvalidRequest):
        text.append("\n  ")
        text.append(harmless(error.field), style="bold")
        text.append(f": {harmless(error.description)}")
    else:
        text.append(f"\n  {message}")
    if error.reason == "NO_API_KEY":
        text.append("\n  this command sends the key that is in SPECDEC_API_KEY", style="dim")
    if isinstance(error, Overloaded | Unavailable):
        text.append(f"\n  try again in {error.retry_after_s:g} s", style="dim")
    for key, value in sorted(error.metadata.items()):
        text.append(harmless(f"\n  {key}: {value}"), style="dim")
    return text
