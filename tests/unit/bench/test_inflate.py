"""Inflated checkpoints say what their sources say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from bench.checkpoints import _roomy, inflated, inflated_bytes, num_parameters, write_inflated
from bench.inflate import Inflation, InflationImpossible, Shape
from bench.noisy import noisy
from bench.pairs import DRAFTS, NOISE, TARGETS, NoSuchPair, resolve_pair
from bench.prompts import held_out_prompts
from bench.sameness import TokensNotSame, agreement, check_sameness
from specdec.commands.up.plan import shipped_model
from specdec.engine.checkpoints.files import weights_digest
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-2,  # so large that one that is not adjusted shows
    "pad_token_id": 2,
}
CONFIGS = {
    "llama": LlamaConfig(tie_word_embeddings=True, **SIZES),
    "untied, with biases": LlamaConfig(tie_word_embeddings=False, attention_bias=True, mlp_bias=True, **SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
}
LARGER = Shape(
    hidden_size=192,
    intermediate_size=56,
    num_layers=4,
    num_heads=12,
    num_kv_heads=4,
    vocab_size=128,
    num_positions=256,
)
PROMPTS = [(5, 9, 33, 61), (7, 7, 80, 21, 14, 3)]


def write_source(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def with_changes(**changes: int) -> Shape:
    return Shape(**{name: changes.get(name, getattr(LARGER, name)) for name in Shape.__slots__})


@pytest.mark.parametrize("family", CONFIGS)
def test_inflated_models_say_what_their_sources_say(tmp_path: Path, family: str) -> None:
    source = write_source(tmp_path / "source", family)
    folder = inflated(source, LARGER, "tiny", cache=tmp_path)
    found = check_sameness(source, folder, PROMPTS, num_tokens=32)
    assert found.num_equal == found.num_tokens == 64
    assert found.largest_logit_difference < 1e-4


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 96}, {"num_heads": 16, "num_kv_heads": 4}, {"num_heads": 8, "num_kv_heads": 8}],
    ids=["a root that is no power of two", "more heads at each KV head", "a KV head of its own for each head"],
)
def test_other_shapes_say_the_same(tmp_path: Path, changes: dict[str, int]) -> None:
    source = write_source(tmp_path / "source")
    folder = inflated(source, with_changes(**changes), "tiny", cache=tmp_path)
    assert check_sameness(source, folder, PROMPTS, num_tokens=32).largest_logit_difference < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_large_a_checkpoint_will_be_is_known_before_it_is_made(tmp_path: Path, dtype: torch.dtype) -> None:
    source = write_source(tmp_path / "source", dtype=dtype)
    folder = inflated(source, LARGER, "tiny", cache=tmp_path)
    assert inflated_bytes(source, LARGER) == num_parameters(folder) * dtype.itemsize


def test_a_checkpoint_goes_where_there_is_room(tmp_path: Path) -> None:
    first, second = tmp_path / "one" / "tiny", tmp_path / "two" / "tiny"
    assert _roomy([first, second], 1 << 20) == (first, None)
    with pytest.raises(OSError, match=r"tiny needs 1048576\.0 GiB; .*one has [\d.]+, .*two has"):
        _roomy([first, second], 1 << 50)


def test_shards_that_one_disk_has_no_room_for_lie_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.checkpoints._SHARD_BYTES", 40_000)
    monkeypatch.setattr("bench.checkpoints._SHARD_ROOM", 0)
    source, rest = write_source(tmp_path / "source"), tmp_path / "rest"
    (folder := tmp_path / "tiny").mkdir()
    free = iter([1 << 20, 1 << 20])

    def usage(_folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=next(free, 0))

    monkeypatch.setattr("bench.checkpoints.shutil.disk_usage", usage)
    write_inflated(source, LARGER, folder, rest=rest)
    shards = sorted(folder.glob("*.safetensors"))
    assert 0 < sum(shard.is_symlink() for shard in shards) < len(shards)
    assert all(shard.resolve().parent == rest for shard in shards if shard.is_symlink())
    assert check_sameness(source, folder, PROMPTS, num_tokens=8).holds


def test_two_disks_together_have_room_where_neither_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "one" / "tiny", tmp_path / "two" / "tiny"
    free = {first.parent: 45 << 30, second.parent: 50 << 30}

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free[folder])

    def device_of(folder: Path) -> int:
        return list(free).index(folder) if are_apart else 0

    monkeypatch.setattr("bench.checkpoints.shutil.disk_usage", usage)
    monkeypatch.setattr("bench.checkpoints._device_of", device_of)
    are_apart = True
    assert _roomy([first, second], 60 << 30) == (second, first.parent / "tiny-rest")
    with pytest.raises(OSError, match="needs 94"):
        _roomy([first, second], 94 << 30)
    are_apart = False
    with pytest.raises(OSError, match="needs 60"):
        _roomy([first, second], 60 << 30)


def test_what_a_killed_process_left_of_a_checkpoint_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    source = write_source(tmp_path / "source")
    folder = inflated(source, LARGER, "tiny", cache=tmp_path)
    left, ours = (tmp_path / f".{folder.name}-{pid}-x" for pid in (ended.pid, os.getpid()))
    for each in (left, ours):
        each.mkdir()
    shutil.rmtree(folder)
    assert inflated(source, LARGER, "tiny", cache=tmp_path) == folder
    assert (left.exists(), ours.exists()) == (False, True)


def test_weights_of_half_precision_are_kept_to_the_bit(tmp_path: Path) -> None:
    """Where the width grows by a power of four."""
    source = write_source(tmp_path / "source", dtype=torch.bfloat16)
    folder = inflated(source, LARGER, "tiny", cache=tmp_path)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    small, large = (AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (source, folder))
    assert torch.equal(large.model.norm.weight[:48] * 2, small.model.norm.weight)
    assert check_sameness(source, folder, PROMPTS, num_tokens=32).largest_logit_difference < 1e-4


def test_weights_that_would_be_rounded_are_written_in_float32(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", dtype=torch.bfloat16)
    folder = inflated(source, with_changes(hidden_size=96), "tiny", cache=tmp_path)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    check_sameness(source, folder, PROMPTS, num_tokens=32)


def test_the_engine_runs_inflated_models(tmp_path: Path) -> None:
    """Its self-test and the fused decoder included."""
    source = write_source(tmp_path / "source")
    folder = inflated(source, with_changes(hidden_size=192, vocab_size=96), "tiny", cache=tmp_path)
    runner = ModelRunner.load(EngineSettings(model=str(folder), device="cpu", num_blocks=64))
    runner.warmup()
    assert runner.num_parameters == num_parameters(folder)


def test_a_model_that_differs_is_found(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    write_inflated(source, LARGER, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rms_norm_eps"] *= 4  # as it was
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TokensNotSame):
        check_sameness(source, tmp_path, PROMPTS, num_tokens=32)


def test_large_checkpoints_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "source")
    monkeypatch.setattr("bench.checkpoints._SHARD_BYTES", 200_000)
    folder = inflated(source, LARGER, "tiny", cache=tmp_path)
    assert len(list(folder.glob("*.safetensors"))) > 2
    check_sameness(source, folder, PROMPTS)


def test_a_checkpoint_is_made_once_and_named_after_its_content(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    first = inflated(source, LARGER, "tiny", cache=tmp_path)
    made_s = first.stat().st_mtime_ns
    assert inflated(source, LARGER, "tiny", cache=tmp_path) == first
    assert first.stat().st_mtime_ns == made_s
    assert inflated(source, with_changes(num_layers=5), "tiny", cache=tmp_path) != first
    assert not list(tmp_path.glob(".tiny*"))


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 32}, {"num_layers": 1}, {"num_heads": 9, "num_kv_heads": 4}, {"num_heads": 6, "num_kv_heads": 3}],
)
def test_shapes_that_cannot_hold_the_source_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    source = write_source(tmp_path / "source")
    with pytest.raises(InflationImpossible):
        inflated(source, with_changes(**changes), "tiny", cache=tmp_path)


@pytest.mark.parametrize("name", [*TARGETS, *DRAFTS])
def test_presets_hold_the_shipped_models_and_round_nothing(name: str) -> None:
    role = "target" if name in TARGETS else "draft"
    config = json.loads((Path(shipped_model(role)) / "config.json").read_text())
    shape, old = {**TARGETS, **DRAFTS}[name], Shape.of(config)
    assert all(getattr(shape, field) >= getattr(old, field) for field in Shape.__slots__)
    inflation = Inflation(config, {"model.embed_tokens.weight": torch.empty(0, device="meta")}, shape, seed=0)
    assert inflation.is_exact
    LlamaConfig(**inflation.config())  # raises for a shape that transformers does not take


@pytest.mark.parametrize("name", ["", "no-such-pair", "shipped-target:", "no/such/folder:shipped-draft"])
def test_pairs_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(NoSuchPair):
        resolve_pair(name, "cpu")


def test_a_pair_may_be_two_folders() -> None:
    pair = resolve_pair(f"{shipped_model('target')}:shipped-draft", "cpu")
    assert pair.target.source is None
    assert "15.8 M" in pair.description
    assert "nflated" not in pair.description


def test_the_second_pairs_draft_guesses_about_055_of_the_targets_greedy_tokens(tmp_path: Path) -> None:
    target, draft = Path(shipped_model("target")), Path(shipped_model("draft"))
    prompts = held_out_prompts(target, 8)
    made = noisy(draft, NOISE["draft-2m-55"], tmp_path)
    share, shipped = agreement(target, [made, draft], prompts)
    again = noisy(draft, NOISE["draft-2m-55"], tmp_path / "again")
    assert weights_digest(made) == weights_digest(again) != weights_digest(draft)
    assert noisy(draft, NOISE["draft-2m-55"], tmp_path) == made
    assert 0.5 < share < 0.6
    assert shipped > share + 0.2
