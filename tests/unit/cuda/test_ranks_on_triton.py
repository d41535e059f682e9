"""Several ranks with a GPU's decoder, as far as Triton's interpreter and gloo can show it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.engine.model.runner import ModelRunner
from tests.support.engine import paged_scenarios as play
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.engine.triton_device import DEVICE
from tests.support.services.rank_probe import engine_settings, run_ranks, tokens_of

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu has this for GPUs")


@pytest.mark.parametrize(
    "deterministic", [pytest.param(None, marks=pytest.mark.long), True], ids=["fast", "deterministic"]
)
def test_ranks_give_the_logits_of_one_and_of_each_other(deterministic: bool | None, tmp_path: Path) -> None:
    folder = save_tiny_model("llama_yarn_bias", tmp_path / "model")
    reports = run_ranks(2, {"tiny": folder}, tmp_path, is_on_triton=True, deterministic=deterministic)
    report = reports["tiny"]
    alone = ModelRunner.load(engine_settings(folder))
    tokens = tokens_of(alone.vocab_size)
    log = play.play_alone(alone, tokens)
    expected = torch.stack([log[tuple(tokens[: i + 1])][0] for i in range(len(tokens))]).numpy()
    first, second = (np.load(tmp_path / f"tiny-{rank}.npy") for rank in (0, 1))
    assert np.abs(first - expected).max() < 1e-4 * expected.std()
    assert np.array_equal(first, second)
    assert ("triton-ordered-decoder" if deterministic else "triton-decoder") in report.numerics_id
    assert report.numerics_id.endswith("/tp2")
    assert report.row_invariant is bool(deterministic)
    if deterministic:
        assert report.num_rows > len(tokens)
        assert report.num_unequal == 0
