"""Run a gateway: `python -m specdec.gateway --coordinators host:50051`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import uvloop

from specdec.service.process import poll_in_one_thread


def main(argv: Sequence[str] | None = None, prog: str = "python -m specdec.gateway") -> int:
    """Read the settings and serve until a signal. Returns the exit code."""
    poll_in_one_thread()  # before the modules below import gRPC
    from specdec.config.sources import settings_or_exit
    from specdec.gateway.service import run_gateway
    from specdec.gateway.settings import GatewaySettings
    from specdec.telemetry import setup_logging

    arguments = sys.argv[1:] if argv is None else argv
    settings = settings_or_exit(GatewaySettings, arguments, env_prefix=GatewaySettings.env_prefix, prog=prog)
    setup_logging("gateway", settings.log_level, settings.log_format)
    gc.freeze()  # modules live for ever; collections, which pause all streams, need not walk them
    return uvloop.run(run_gateway(settings))


if __name__ == "__main__":
    sys.exit(main())
