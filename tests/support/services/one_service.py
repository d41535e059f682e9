"""One service as a process, without a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from specdec.commands.up.cluster import RoleSettings, free_port, service_spec
from specdec.commands.up.service_process import ServiceProcess


@asynccontextmanager
async def running(role: str, overrides: dict[str, object], folder: Path) -> AsyncIterator[ServiceProcess]:
    """Start a service on a free port, which may not be ready yet; it is killed at the end."""
    settings = RoleSettings(overrides={"metrics_port": None, **overrides})
    process = ServiceProcess(service_spec(role, role, free_port(), settings, environment={}), folder / f"{role}.log")
    process.start()
    try:
        yield process
    finally:
        process.kill()
