"""A model's runner on the fake device, of few layers and with few captured steps.

``TRITON_INTERPRET=1 python -m tests.support.fake_cuda.runners MODULE ARGS...`` runs a module on the fake device.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.engine.cuda import buckets
from specdec.engine.drawing import device as drawing
from specdec.engine.model import runner as runner_module
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.fake_cuda.install import fake_cuda

BLOCK_SIZE, BLOCKS_EACH = 4, 8
ROWS = (1, 4)
"""Row counts of captured steps."""


def capture_few(patch: pytest.MonkeyPatch) -> None:
    """Capture few steps: each takes seconds."""
    patch.setattr(buckets, "ROW_BUCKETS", ROWS)
    patch.setattr(runner_module, "_WARMUP_ROWS", (2,))
    patch.setattr(runner_module, "_CHECKED_ROWS", (1, 3))  # of each bucket; larger steps are not replayed


def warm_runner(
    architecture: str, folder: Path, patch: pytest.MonkeyPatch, num_layers: int = 1, **more: Any
) -> ModelRunner:
    """Load and warm up a tiny model on `cuda:0`, within `fake_cuda`.

    Args:
        architecture: name in `tiny_models`.
        folder: where its files are written.
        patch: is not undone before the runner's last step.
        num_layers: layers that are kept.
        more: further engine settings.
    """
    model = save_tiny_model(architecture, folder)
    config = json.loads((model / "config.json").read_text())
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    config |= {layers: num_layers, "layer_types": (config.get("layer_types") or ["full_attention"] * 9)[:num_layers]}
    (model / "config.json").write_text(json.dumps(config))
    capture_few(patch)
    settings = EngineSettings(
        model=str(model),
        device="cuda:0",
        block_size=BLOCK_SIZE,
        num_blocks=3 * BLOCKS_EACH,
        **{"dtype": "float32", **more},
    )
    runner = ModelRunner.load(settings)
    runner.warmup()
    return runner


def main() -> None:
    """Run a module as a program."""
    sys.argv = sys.argv[1:]
    with pytest.MonkeyPatch.context() as patch, fake_cuda():
        capture_few(patch)
        patch.setattr(drawing, "ROUND_BUCKETS", (2, 3))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
