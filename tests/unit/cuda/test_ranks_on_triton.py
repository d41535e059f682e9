"""Several ranks with a GPU's decoder, as far as Triton's interpreter and gloo can show it."""

import socket
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.cuda.buckets import BucketedSteps
from specdec.engine.leading_runner import LeadingRunner
from specdec.engine.model.kv_budget import largest_batch
from specdec.engine.model.runner import ModelRunner
from specdec.engine.parallel.step_frames import batch_of, receive_frame
from specdec.engine.tap import FINAL, HiddenTap
from tests.support.engine import paged_scenarios as play
from tests.support.engine.captures import Captures
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


class CountedSteps:
    """Steps of a runner, replayed in buckets, and how often its model was really run: each run has collectives."""

    def __init__(self, runner: ModelRunner) -> None:
        self.num_runs = 0
        self._step_model = runner._step_model
        steps = BucketedSteps(self._counted, Captures())
        steps.serve(runner._cache)
        runner._step_model = steps

    def _counted(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        self.num_runs += 1
        return self._step_model(batch, cache)


def test_what_one_rank_captures_all_do(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    leader, follower = (ModelRunner.load(engine_settings(folder)) for _ in range(2))
    of_leader, of_follower = CountedSteps(leader), CountedSteps(follower)
    here, there = socket.socketpair()
    with closing(there), closing(here):
        leading = LeadingRunner(leader, [here])
        for layer_ids in ((), (FINAL,), (0, 2), (FINAL,), ()):
            batch, _ = largest_batch(3, 64, leader.block_size, torch.device("cpu"))
            batch.tap = HiddenTap(layer_ids) if layer_ids else None
            leading.forward(batch)
            assert batch.tap is None or batch.tap.states is not None
            follower.forward(batch_of(receive_frame(there), follower.device))
            assert of_leader.num_runs == of_follower.num_runs
    assert of_leader.num_runs > 5
