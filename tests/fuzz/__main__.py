"""`python -m tests.fuzz`: what no peer of ours would send, from a printed seed."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from typing import Annotated

import typer

from tests.fuzz.cases import run_cases
from tests.fuzz.every_link import ALL


def main(
    seed: Annotated[int | None, typer.Option(help="Of all cases; none: a random one.", min=0)] = None,
    seconds: Annotated[float, typer.Option(help="How long in all.", min=0)] = 60.0,
    link: Annotated[str, typer.Option(help=f"One of {', '.join(sorted(ALL))}; none: all in turn.")] = "",
    case: Annotated[int | None, typer.Option(help="Number of the only case to run.", min=0)] = None,
) -> None:
    """Send messages that are wrong at one place, and see that nobody else notices."""
    for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
        del os.environ[name]
    seed = secrets.randbits(32) if seed is None else seed
    typer.echo(f"seed {seed}")
    names = [link] if link else sorted(ALL)
    num_found = 0
    for name in names:
        until_s = None if case is not None else time.monotonic() + seconds / len(names)
        numbers = itertools.count() if case is None else [case]
        counted: list[int] = []
        found = asyncio.run(
            run_cases(ALL[name], seed, (counted.append(number) or number for number in numbers), until_s=until_s)
        )
        typer.echo(f"{name}: {len(counted)} cases, {len(found)} found")
        for line in found:
            typer.echo(f"  {line}")
        num_found += len(found)
    raise typer.Exit(1 if num_found else 0)


if __name__ == "__main__":
    typer.run(main)
