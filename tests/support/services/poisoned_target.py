"""A target's engine whose model raises for token id `POISON`, as a request that kills engines does."""

from __future__ import annotations

import torch

from specdec.config import TargetSettings
from specdec.engine.batch import Batch
from specdec.engine.model.runner import ModelRunner
from specdec.replica.bridge.frames import EnginePort
from specdec.target_service import worker

POISON = 7


def run_engine(port: EnginePort, settings: TargetSettings) -> None:
    """Run the target's engine with the raising model."""
    forward = ModelRunner.forward

    def raising(self: ModelRunner, batch: Batch) -> torch.Tensor:
        if POISON in batch.input_ids.tolist():
            raise ValueError("poison")
        return forward(self, batch)

    ModelRunner.forward = raising  # type: ignore[method-assign]
    worker.run_engine(port, settings)
