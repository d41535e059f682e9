"""Runs a gateway: `python -m gateway --coordinators host:50051`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop

_ONE_POLLING_THREAD = "-event_engine_client"
"""gRPC's event engine hands each message from thread to thread. Without it a token costs a fifth less CPU time, and
comes sooner. See docs/decisions/gateway.md."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m gateway") -> int:
    """Read the settings and serve until a signal; returns the exit code."""
    os.environ.setdefault("GRPC_EXPERIMENTS", _ONE_POLLING_THREAD)
    # gRPC reads that when it is imported, which these do.
    from gateway.service import run_gateway
    from gateway.settings import GatewaySettings
    from specdec.settings_sources import settings_or_exit
    from specdec.telemetry import setup_logging

    arguments = sys.argv[1:] if argv is None else argv
    settings = settings_or_exit(GatewaySettings, arguments, env_prefix=GatewaySettings.env_prefix, prog=prog)
    setup_logging("gateway", settings.log_level, settings.log_format)
    return uvloop.run(run_gateway(settings))


if __name__ == "__main__":
    sys.exit(main())
