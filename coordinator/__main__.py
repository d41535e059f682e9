"""Runs a coordinator: `python -m coordinator --targets host:50052 --drafts host:50053`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from coordinator.service import CoordinatorService
from specdec.config import CoordinatorSettings, settings_or_exit
from specdec.rpc.server import run_service
from specdec.telemetry import BuildInfo, setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Read the settings and serve until a signal; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    prefix = CoordinatorSettings.env_prefix
    settings = settings_or_exit(CoordinatorSettings, arguments, env_prefix=prefix, prog="coordinator")
    setup_logging("coordinator", settings.log_level, settings.log_format)
    return asyncio.run(_serve(settings))


async def _serve(settings: CoordinatorSettings) -> int:
    registry = CollectorRegistry()
    BuildInfo(registry, "coordinator")
    service = CoordinatorService(settings, registry)
    return await run_service(service, settings, registry=registry, announcer=service.announcer)


if __name__ == "__main__":
    sys.exit(main())
