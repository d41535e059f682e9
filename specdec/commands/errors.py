"""Reports of errors: the typed error with its fields, no traceback, one exit code per cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import typer
from rich.console import Console
from rich.text import Text

from specdec.commands.views.failures import EXIT_CODES, EXIT_FAILURE, EXIT_INTERRUPTED, connect_failure
from specdec.commands.views.tables import harmless
from specdec.wire.errors import InvalidRequest, Overloaded, SpecdecError, Unavailable


class ClusterFailed(Exception):
    """A service did not start, or ended by itself; the message names it, the cause and its log."""


@contextmanager
def reported_errors(console: Console, address: str = "", role: str = "coordinator") -> Iterator[None]:
    """Print a typed error and exit with its code; `address` is the called server's, `role` the expected service."""
    try:
        yield
    except SpecdecError as error:
        console.print(describe(error, address, role))
        raise typer.Exit(EXIT_CODES.get(error.code.name, EXIT_FAILURE)) from None
    except ClusterFailed as error:
        console.print(Text.assemble(("error: ", "bold red"), str(error)))
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


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
        text.append(f"\n  {address} does not know the call: the service there is no {role}")
        return text
    if isinstance(error, InvalidRequest):
        text.append("\n  ")
        text.append(harmless(error.field), style="bold")
        text.append(f": {harmless(error.description)}")
    else:
        text.append(f"\n  {message}")
    if error.reason == "NO_API_KEY":
        text.append("\n  this command sends the key in SPECDEC_API_KEY", style="dim")
    if isinstance(error, Overloaded | Unavailable):
        text.append(f"\n  try again in {error.retry_after_s:g} s", style="dim")
    for key, value in sorted(error.metadata.items()):
        text.append(harmless(f"\n  {key}: {value}"), style="dim")
    return text
