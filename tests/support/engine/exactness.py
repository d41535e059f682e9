"""Whether a served model has transformers' logits, and the same bits whatever else the engine computes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine import paged_scenarios as play
from tests.support.engine.tiny_models import VOCAB_SIZE, save_random

TOKENS = play.random_tokens(64, 5, VOCAB_SIZE)
OTHERS = [play.random_tokens(3 + i, 10 + i, VOCAB_SIZE) for i in range(9)]


def check_exactness(config: PreTrainedConfig, directory: Path, *, native: str) -> ModelRunner:
    """Load random weights with `deterministic`; compare with transformers, and rows alone with rows in company, in
    chunks, in trees, after forks, prefix hits and preemption. Returns the runner.
    """
    save_random(config, directory)
    settings = {"model": str(directory), "device": "cpu", "num_blocks": 96, "max_model_len": 128}
    runner = ModelRunner.load(EngineSettings.model_validate({**settings, "native": native, "deterministic": True}))
    alone = play.play_alone(runner, TOKENS)
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([TOKENS])).logits[0]
    for path, rows in alone.items():
        torch.testing.assert_close(rows[0], theirs[len(path) - 1], rtol=1e-4, atol=1e-4)
    first, wrong = TOKENS[:40], TOKENS[40:46]
    ways = (
        play.play_in_batch(runner, TOKENS, OTHERS),
        play.play_alone(runner, TOKENS, max_batch_tokens=7),
        play.play_trees(runner, first, 19, wrong),
        play.play_fork(runner, first, 19, wrong),
        play.play_cache_hit(runner, TOKENS),
        play.play_preemption(runner, TOKENS[:52], 46, TOKENS[::-1]),
    )
    compared = [(path, row, alone[path][0]) for log in ways for path in log.keys() & alone.keys() for row in log[path]]
    assert len(compared) > 2 * len(TOKENS)
    for path, row, expected in compared:
        assert torch.equal(row, expected), len(path)
    return runner
