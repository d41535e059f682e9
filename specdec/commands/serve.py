"""`specdec serve`: one service in this process."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from specdec.commands.up.service_process import MODULES
from specdec.commands.views.failures import EXIT_USAGE


def serve(
    context: typer.Context,
    role: Annotated[str, typer.Argument(metavar="target|draft|coordinator|gateway", help="The service to run.")],
) -> None:
    """Run one service in this process. Flags after its name are its settings: specdec serve target --help."""
    if role in ("--help", "-h"):
        typer.echo(context.get_help())
        raise typer.Exit
    if role not in MODULES:
        typer.echo(f"specdec serve: {role!r} is none of {', '.join(MODULES)}", err=True)
        raise typer.Exit(EXIT_USAGE)
    service = importlib.import_module(f"{MODULES[role]}.__main__")
    raise typer.Exit(service.main(context.args, prog=f"specdec serve {role}") or 0)
