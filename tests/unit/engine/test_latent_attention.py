"""Latent attention (MLA): the cache holds latents, logits are those of transformers' expanded heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LongcatFlashConfig, MiniCPM3Config, PreTrainedConfig, YoutuConfig

from specdec.engine.attention.latent import BatchedProduct, HeadPacker
from specdec.engine.model.linear import TorchHeads
from specdec.engine.model.runner import ModelRunner
from specdec.engine.native.kernels import NativeKernels
from specdec.engine.native.latent import NativeHeads
from specdec.engine.settings import EngineSettings
from tests.support.engine.exactness import check_exactness
from tests.support.engine.mixtures import LATENT, MIXTURES
from tests.support.engine.paged_attention import random_rows
from tests.support.engine.tiny_models import save_random

_DENSE: dict[str, Any] = {name: value for name, value in LATENT.items() if "expert" not in name}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "minicpm3": lambda: MiniCPM3Config(**_DENSE),
    "youtu": lambda: YoutuConfig(**_DENSE),
    "longcat_flash": lambda: LongcatFlashConfig(
        **LATENT, head_dim=8, num_layers=1, zero_expert_num=2, moe_topk=3, ffn_hidden_size=40, expert_ffn_hidden_size=40
    ),
    **{name: MIXTURES[name] for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
}
RANK, POSITIONAL = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]


@pytest.mark.parametrize("name", list(MODELS))
def test_latents_are_cached_in_place_of_heads(name: str, tmp_path: Path) -> None:
    runner = check_exactness(MODELS[name](), tmp_path, native="on")
    assert runner.num_kv_bytes == runner.num_blocks * runner.block_size * 2 * (RANK + POSITIONAL) * 4
    assert "-latent-1" in runner.numerics_id


def test_latents_are_cached_in_torch_too(tmp_path: Path) -> None:
    check_exactness(MODELS["minicpm3"](), tmp_path, native="off")


def test_a_model_in_half_precision_caches_latents(tmp_path: Path) -> None:
    save_random(MODELS["minicpm3"](), tmp_path, dtype=torch.bfloat16)
    runner = ModelRunner.load(EngineSettings(model=str(tmp_path), device="cpu", dtype="bfloat16", num_blocks=8))
    assert runner.num_kv_bytes == 8 * runner.block_size * 2 * (RANK + POSITIONAL) * 2


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_products_per_head_have_the_same_bits_for_any_rows_and_threads(kind: str) -> None:
    weights, rows = random_rows(5 * 40, 24).view(5, 40, 24), random_rows(64, 5, 24, seed=1)
    packers: list[HeadPacker] = [
        partial(NativeHeads, NativeKernels(count)) if kind == "native" else partial(TorchHeads, num_threads=count)
        for count in (1, 2, 3)
    ]
    expected = torch.empty(64, 5, 40)
    BatchedProduct(weights)(rows, expected)
    same = torch.empty(64, 5, 40)
    packers[0](weights)(rows, same)
    torch.testing.assert_close(same, expected, rtol=1e-4, atol=1e-4)
    for pack, count in itertools.product(packers, (1, 2, 9, 33)):
        wide = torch.zeros(count, 5, 47)  # a part of a wider row, as queries are
        strided = rows[64 - count :].transpose(0, 1).contiguous().transpose(0, 1)
        pack(weights)(strided, wide[..., :40])
        assert torch.equal(wide[..., :40], same[64 - count :]), count
        assert not wide[..., 40:].any()
