"""Keys and values of 8 bits, for drafts: the logits of rounded keys and values, in a quarter of float32's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from specdec.config import DraftSettings, TargetSettings
from specdec.engine.attention.kv_cache import LARGEST_FP8, KVCache, LayerGeometry
from specdec.engine.attention.torch_kernels import TiledAttention
from specdec.engine.errors import ModelLoadError
from specdec.engine.model import device_choice
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine import paged_scenarios as play
from tests.support.engine.dense_reference import SCENARIOS
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.mixtures import MIXTURES
from tests.support.engine.tiny_models import VOCAB_SIZE, save_random, save_tiny_model
from tests.support.for_each import for_each

FP8 = torch.float8_e4m3fn
TOKENS = play.random_tokens(45, 1, VOCAB_SIZE)
KINDS = ("gemma2", "gpt_oss_sinks", LATENT := "deepseek_v3")
"""Sliding windows with soft caps; with sinks; latent attention, whose values are in its keys."""


def rounded(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.float().clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8).float()


def load(model: Path, **more: Any) -> ModelRunner:
    settings = {"device": "cpu", "num_blocks": 40, "block_size": 8, "max_model_len": 128, "fused": "off", **more}
    return ModelRunner.load(EngineSettings(model=str(model), **settings))


@for_each("kind", KINDS)
def test_logits_are_those_of_float32_keys_and_values_that_were_rounded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / kind
    if kind == LATENT:
        save_random(MIXTURES[kind](), model)
    else:
        save_tiny_model(kind, model)
    ours = load(model, kv_cache_dtype="fp8")
    assert "/fp8-kv/" in ours.numerics_id
    found = {name: play_it(ours) for name, play_it in SCENARIOS.items()}
    with monkeypatch.context() as patch:
        write = KVCache.write
        patch.setattr(KVCache, "write", lambda self, layer, slots, *kv: write(self, layer, slots, *map(rounded, kv)))
        patch.setattr("specdec.engine.model.building.NativeAttention", lambda kernels: TiledAttention())
        reference = load(model, self_test=False)
        wanted = {name: play_it(reference) for name, play_it in SCENARIOS.items()}
        assert ours.num_kv_bytes * 4 == reference.num_kv_bytes
    for name, log in wanted.items():
        assert found[name].keys() == log.keys()
        for path, rows in log.items():
            assert all(torch.equal(a, b) for a, b in zip(found[name][path], rows, strict=True)), (name, len(path))


def test_a_budget_holds_four_times_the_tokens_of_float32(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path)
    settings = {"num_blocks": None, "kv_cache_memory_bytes": 1 << 18, "max_batch_seqs": 256}
    assert load(model, kv_cache_dtype="fp8", **settings).num_blocks // 4 == load(model, **settings).num_blocks


def test_a_cache_beyond_the_machines_memory_is_refused_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"^num_blocks: \d+ blocks exceed the memory of the machine; lower it$"):
        load(save_tiny_model("llama", tmp_path), num_blocks=1 << 40)


def test_numbers_beyond_the_range_are_limited_and_nan_stays() -> None:
    cache = KVCache([LayerGeometry(1, 4, 4)], 2, 4, FP8, torch.device("cpu"))
    keys = torch.tensor([[[1e9, -torch.inf, torch.nan, 2.0**-9]]])
    cache.write(0, torch.tensor([5]), keys, -keys)
    stored = cache.keys[0][1, :, 1].float()
    assert torch.equal(stored.nan_to_num(7.0), torch.tensor([[LARGEST_FP8, -LARGEST_FP8, 7.0, 2.0**-9]]))
    assert torch.equal(cache.values[0][1, :, 1].float().nan_to_num(7.0)[0, :2], torch.tensor([-448.0, 448.0]))
    assert cache.num_bytes == 2 * 2 * 4 * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_keys_of_8_bits_changes_no_token_of_the_target_and_is_accepted(temperature: float) -> None:
    pair = LocalPair(draft_options={"kv_cache_dtype": "fp8"})
    assert "fp8-kv" in pair.draft_built.info.identity.numerics_id
    body = open_session(prompts()[0], temperature=temperature, seed=3, max_tokens=48, ignore_eos=True)
    fast = pair.run({"s": body})["s"]
    pair.reset()
    assert fast.token_ids == pair.run({"s": body}, use_draft=False)["s"].token_ids
    assert fast.num_accepted > 10


def test_targets_several_ranks_and_older_gpus_are_refused_with_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match="kv_cache_dtype changes a target's output: set it at drafts"):
        TargetSettings(model="m", kv_cache_dtype="fp8")
    with pytest.raises(ValidationError, match="kv_cache_dtype fp8 needs tensor_parallel_size 1"):
        DraftSettings(model="m", kv_cache_dtype="fp8", tensor_parallel_size=2)
    with pytest.raises(ValidationError, match="kv_cache_dtype"):
        DraftSettings(model="m", kv_cache_dtype="fp4")  # type: ignore[arg-type]
    own = TargetSettings(model="m", own_draft={"model": "d", "kv_cache_dtype": "fp8"})  # type: ignore[arg-type]
    assert own.own_draft_settings is not None
    assert own.own_draft_settings.kv_cache_dtype == "fp8"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    settings = EngineSettings(model="m", kv_cache_dtype="fp8")
    with pytest.raises(ModelLoadError, match=r"kv_cache_dtype: fp8 needs a GPU of compute capability 8\.9"):
        device_choice.check_quantization(settings, torch.bfloat16, torch.device("cuda:0"))
