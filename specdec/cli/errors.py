"""How the command reports errors: the typed error and its fields, no traceback, one exit code per cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import typer
from rich.console import Console
from rich.text import Text

from specdec.rpc.errors import InvalidRequest, Overloaded, SpecdecError, Unavailable

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: EXIT_USAGE,
    grpc.StatusCode.OUT_OF_RANGE: EXIT_USAGE,
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
def reported_errors(console: Console) -> Iterator[None]:
    """Print typed errors that pass through and leave with their exit code."""
    try:
        yield
    except SpecdecError as error:
        console.print(describe(error))
        raise typer.Exit(EXIT_CODES.get(error.code, EXIT_FAILURE)) from None
    except ClusterFailed as error:
        console.print(Text.assemble(("error: ", "bold red"), str(error)))
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def describe(error: SpecdecError) -> Text:
    """Return the error as text: code, reason, field, message, when to try again."""
    text = Text.assemble(("error: ", "bold red"), (error.code.name, "red"))
    if error.reason != error.code.name:
        text.append(f" ({error.reason})", style="red")
    if isinstance(error, InvalidRequest):
        text.append("\n  ")
        text.append(error.field, style="bold")
        text.append(f": {error.description}")
    else:
        text.append(f"\n  {error.message}")
    if isinstance(error, Overloaded | Unavailable):
        text.append(f"\n  try again in {error.retry_after_s:g} s", style="dim")
    for key, value in sorted(error.metadata.items()):
        text.append(f"\n  {key}: {value}", style="dim")
    return text
