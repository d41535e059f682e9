"""Links fuzzed from a fixed seed, as `make test-all` does, and from a random one for minutes."""

from __future__ import annotations

import itertools
import secrets
import time

import psutil
import typer

from tests.fuzz.cases import Link, run_cases
from tests.support.services.faults import eventually

SEED = 20261122
_MOST_MORE_DESCRIPTORS = 8
"""Of this process: gRPC keeps some for its threads once it has begun."""


async def find_nothing(link: Link, num_cases: int, seed: int = SEED) -> None:
    """Run so many cases of a link; raises AssertionError with what was found, or when descriptors are left open."""
    process = psutil.Process()
    num_before = process.num_fds()
    found = await run_cases(link, seed, range(num_cases))
    assert not found, "\n".join(found)

    async def are_closed() -> bool:  # by themselves: where a channel is collected inside its event loop, gRPC may hang
        return process.num_fds() <= num_before + _MOST_MORE_DESCRIPTORS

    await eventually(are_closed, "descriptors are closed")


async def find_nothing_for(link: Link, seconds: float) -> None:
    """Run cases from a random seed, which is printed, for so long. Raises AssertionError with what was found."""
    seed = secrets.randbits(32)
    typer.echo(f"{link.name}: seed {seed}")
    found = await run_cases(link, seed, itertools.count(), until_s=time.monotonic() + seconds)
    assert not found, "\n".join(found)
