"""What others left in a block, NaN even, changes no bit of whoever gets the block next."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions, ForwardContext
from specdec.engine.attention.torch_kernels import GatherAttention, TiledAttention
from specdec.engine.model.proofs.probe import SelfTest
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine import paged_scenarios as play
from tests.support.engine.tiny_models import VOCAB_SIZE, save_tiny_model

TOKENS = play.random_tokens(39, 5, VOCAB_SIZE)
WRONG = play.random_tokens(6, 6, VOCAB_SIZE)
PATHS = {
    "fused": ("llama_wide_heads", {}),
    "fused, sliding window": ("mistral", {}),
    "native": ("gemma2", {}),
    "torch": ("llama", {"native": "off"}),
    "torch, sliding window": ("mistral", {"native": "off"}),
}


@pytest.mark.parametrize("name", PATHS)
def test_nan_in_stale_slots_changes_no_logit(name: str, tmp_path: Path) -> None:
    model, options = PATHS[name]
    settings = {"model": str(save_tiny_model(model, tmp_path)), "device": "cpu", "num_blocks": 64, "max_model_len": 128}
    runner = ModelRunner.load(EngineSettings.model_validate({**settings, **options}))
    logs = []
    for stale in (0.0, math.nan):
        with torch.inference_mode():
            for tensor in (*runner._cache.keys, *runner._cache.values):
                tensor.fill_(stale)
        logs.append([play.play_alone(runner, TOKENS, 13), play.play_trees(runner, TOKENS, 19, WRONG)])
    for clean, stained in zip(*logs, strict=True):
        assert clean.keys() == stained.keys()
        for path, rows in clean.items():
            for row, other in zip(rows, stained[path], strict=True):
                assert row.isfinite().all()
                assert torch.equal(row, other)


@pytest.mark.parametrize("kernel", [TiledAttention(), GatherAttention()], ids=["tiled", "gather"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_kernel_reads_no_slot_that_is_not_its_rows(
    kernel: TiledAttention | GatherAttention, window: int | None
) -> None:
    probe = SelfTest(VOCAB_SIZE, 64, 8, torch.device("cpu"))
    batch = probe.batch(probe.prefix_rows(11))
    query, key, value = torch.randn(3, 11, 2, 16, generator=torch.Generator().manual_seed(3)).unbind(0)
    results = []
    for stale in (0.0, math.nan):
        cache = KVCache([LayerGeometry(2, 16, 16)], probe.num_blocks, 8, torch.float32, torch.device("cpu"))
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(stale)
        context = ForwardContext(batch, cache, kernel)
        options = AttentionOptions(scaling=0.25, sliding_window=window)
        results.append(kernel(query, key, value, 0, context, options))
    assert results[0].isfinite().all()
    assert torch.equal(*results)
