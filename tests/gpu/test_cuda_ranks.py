"""A model over two CUDA devices. What needs no GPU of this is tested in tests/integration/test_tensor_parallel.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.engine.model.runner import ModelRunner
from tests.support.engine import paged_scenarios as play
from tests.support.services.rank_probe import engine_settings, run_ranks, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

SHIPPED = Path(__file__).parents[2] / "models" / "target"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_two_gpus_give_the_logits_of_one_and_of_each_other(dtype: str, tolerance: float, tmp_path: Path) -> None:
    """The tolerance is of the logits' spread, root mean square."""
    report = run_ranks(2, {"shipped": SHIPPED}, tmp_path, ["shipped"], device="cuda", dtype=dtype)["shipped"]
    alone = ModelRunner.load(engine_settings(SHIPPED, device="cuda:0", dtype=dtype))
    tokens = tokens_of(alone.vocab_size)
    log = play.play_alone(alone, tokens)
    expected = torch.stack([log[tuple(tokens[: i + 1])][0] for i in range(len(tokens))]).cpu().numpy()
    first, second = (np.load(tmp_path / f"shipped-{rank}.npy") for rank in (0, 1))
    assert np.sqrt(np.square(first - expected).mean()) < tolerance * expected.std()
    assert np.array_equal(first, second)
    assert report.num_parameters == alone.num_parameters
    assert report.num_kv_bytes * 2 == alone.num_kv_bytes
    assert report.numerics_id.endswith("/tp2")
