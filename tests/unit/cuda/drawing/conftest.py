"""A small model, and what draws several tokens a call over it as on a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from specdec.engine.cuda import passes
from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine.captures import Captures
from tests.support.engine.device_drawing import device_drawing_of
from tests.support.engine.drawn_rows import BLOCK_SIZE
from tests.support.engine.tiny_models import save_tiny_model


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    model = str(save_tiny_model("qwen3", tmp_path))
    runner = ModelRunner.load(EngineSettings(model=model, device="cpu", block_size=BLOCK_SIZE, num_blocks=40))
    if runner.fused is None:
        pytest.skip("no native kernels")
    return runner


@pytest.fixture
def device(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceDrawing, Captures]:
    monkeypatch.setattr(passes, "_MOST_AHEAD_S", math.inf)  # played, captures take as long as the machine is busy
    return device_drawing_of(runner)
