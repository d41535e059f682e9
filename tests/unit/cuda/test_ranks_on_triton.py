"""Several ranks with a GPU's decoder, as far as Triton's interpreter and gloo can show it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.batch import Batch
from specdec.engine.cuda.buckets import BucketedSteps
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.kv_budget import largest_batch
from specdec.engine.model.loader import random_model
from specdec.engine.model.runner import ModelRunner
from specdec.engine.parallel.step_frames import batch_of, forward_frame
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
    folder = save_tiny_model("llama_yarn_bias", tmp_path / "model", num_layers=2)
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
        steps = BucketedSteps(self._counted, runner._cache, Captures())
        runner._step_model = steps

    def _counted(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        self.num_runs += 1
        return self._step_model(batch, cache)


def test_what_one_rank_captures_all_do(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    leader, follower = (ModelRunner.load(engine_settings(folder)) for _ in range(2))
    of_leader, of_follower = CountedSteps(leader), CountedSteps(follower)
    for layer_ids in ((), (FINAL,), (0, 2), (FINAL,), ()):
        batch, _ = largest_batch(3, 64, leader.block_size, torch.device("cpu"))
        batch.tap = HiddenTap(layer_ids) if layer_ids else None
        sent = forward_frame(batch)  # what ranks on GPUs are told (tests/unit/engine/test_tensor_parallel.py)
        leader.forward(batch)
        assert batch.tap is None or batch.tap.states is not None
        follower.forward(batch_of(sent, follower.device))
        assert of_leader.num_runs == of_follower.num_runs
    assert of_leader.num_runs > 5


class NotedGroup:
    """The second of two ranks, on the meta device, and its collectives in order."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.called: list[str] = []

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors."""
        self.called.append("gather")
        return local.new_empty(self.size, *local.shape)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Their sum, in whatever order the library has."""
        self.called.append("sum")
        return partial


@pytest.mark.parametrize("row_invariant", [False, True], ids=["fast", "deterministic"])
@torch.inference_mode()
def test_a_deterministic_step_leaves_no_sum_over_ranks_to_the_library(row_invariant: bool) -> None:
    meta, geometry, layers = torch.device("meta"), LayerGeometry(2, 64, 64), 3
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2
    )
    model = random_model(config, torch.bfloat16, meta)
    model.config.num_attention_heads *= NotedGroup.size  # these weights are a rank's half
    group: Any = NotedGroup()
    decoder = DeviceDecoder(model, [AttentionOptions(0.125)] * layers, 64, row_invariant=row_invariant, group=group)
    batch, num_blocks = largest_batch(5, 64, 16, meta)
    decoder(batch, KVCache([geometry] * layers, num_blocks, 16, torch.bfloat16, meta))
    assert group.called == ["gather" if row_invariant else "sum"] * (2 * layers)
