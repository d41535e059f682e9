"""A target's engine that ends, without a word, in any step that computes one token id."""

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
    """As the target's own entry."""
    forward = ModelRunner.forward

    def deadly(self: ModelRunner, batch: Batch) -> torch.Tensor:
        if DEADLY in batch.input_ids.tolist():
            os._exit(3)
        return forward(self, batch)

    ModelRunner.forward = deadly  # type: ignore[method-assign]
    worker.run_engine(port, settings)


def main() -> int:
    """A replica of the target service over that engine; runs until a signal ends it."""
    from specdec.config.sources import settings_or_exit
    from specdec.replica.bridge.replica_service import run_replica  # an engine does without
    from specdec.target_service.__main__ import ROLE

    role = replace(ROLE, engine_entry=ENGINE_ENTRY)
    return run_replica(
        role, settings_or_exit(TargetSettings, sys.argv[1:], env_prefix="SPECDEC_TARGET_", prog="deadly")
    )


if __name__ == "__main__":
    sys.exit(main())
