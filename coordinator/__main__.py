"""Run a coordinator: `python -m specdec.coordinator --targets host:50052 --drafts host:50053`."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence

from specdec.config import CoordinatorSettings, settings_or_exit
from specdec.coordinator.service import run_coordinator
from specdec.coordinator.supervisor import Supervisor
from specdec.telemetry import setup_logging


def main(argv: Sequence[str] | None = None, prog: str = "python -m specdec.coordinator") -> int:
    """Read the settings and serve until a signal. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    prefix = CoordinatorSettings.env_prefix
    settings = settings_or_exit(CoordinatorSettings, arguments, env_prefix=prefix, prog=prog)
    setup_logging("coordinator", settings.log_level, settings.log_format)
    if settings.num_processes > 1:
        return asyncio.run(Supervisor(settings).run())
    gc.freeze()  # modules live for ever; collections, which pause all streams, need not walk them
    return asyncio.run(run_coordinator(settings))


if __name__ == "__main__":
    sys.exit(main())
