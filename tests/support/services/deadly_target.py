"""A target's engine that exits silently in any step that computes token id `DEADLY`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch

from specdec.config import TargetSettings
from specdec.engine.batch import Batch
from specdec.engine.model.runner import ModelRunner
from specdec.replica.bridge.frames import EnginePort
from specdec.target_service import worker

DEADLY = 7
ENGINE_ENTRY = "tests.support.services.deadly_target:run_engine"


def run_engine(port: EnginePort, settings: TargetSettings) -> None:
    """Run the target's engine with the deadly model."""
    forward = ModelRunner.forward

    def deadly(self: ModelRunner, batch: Batch) -> torch.Tensor:
        if DEADLY in batch.input_ids.tolist():
            os._exit(3)
        return forward(self, batch)

    ModelRunner.forward = deadly  # type: ignore[method-assign]
    worker.run_engine(port, settings)


def main() -> int:
    """Run a replica of the target service with this engine until a signal ends it."""
    from specdec.config.sources import settings_or_exit
    from specdec.replica.bridge.replica_service import run_replica  # engines do not import it
    from specdec.target_service.__main__ import ROLE

    role = replace(ROLE, engine_entry=ENGINE_ENTRY)
    return run_replica(
        role, settings_or_exit(TargetSettings, sys.argv[1:], env_prefix="SPECDEC_TARGET_", prog="deadly")
    )


if __name__ == "__main__":
    sys.exit(main())
