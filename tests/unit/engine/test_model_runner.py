"""Paged logits of every supported architecture against one plain forward pass of transformers."""

import json
from pathlib import Path

import pytest
import torch

from specdec.engine.errors import ModelLoadError, ModelNotSupported
from specdec.engine.model.loader import load_model
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine import paged_scenarios as play
from tests.support.engine.dense_reference import PROMPT, SCENARIOS, TOKENS, Reference
from tests.support.engine.tiny_models import SUPPORTED, SWITCHED, VOCAB_SIZE, llama4, save_random, save_tiny_model

MAX_ERROR = 1e-4


@pytest.fixture(scope="module", params=list(SUPPORTED))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def load(directory: Path, **settings: object) -> ModelRunner:
    defaults: dict[str, object] = {
        "model": str(directory),
        "block_size": 8,
        "num_blocks": 64,
        "device": "cpu",
    }
    return ModelRunner.load(EngineSettings.model_validate({**defaults, **settings}))


@pytest.mark.parametrize(
    "settings",
    [{}, {"fused": "off", "num_threads": 2}, {"native": "off"}],
    ids=["fastest kernels", "native kernels", "torch alone"],
)
def test_paged_logits_are_those_of_one_dense_forward(model_dir: Path, settings: dict[str, object]) -> None:
    runner = load(model_dir, **settings)
    reference = Reference(model_dir)
    assert runner.row_invariant
    errors = {name: reference.largest_error(scenario(runner)) for name, scenario in SCENARIOS.items()}
    assert max(errors.values()) < MAX_ERROR, errors


@pytest.mark.parametrize("name", list(SWITCHED))
def test_logits_past_windows_and_scales_are_those_of_one_dense_forward(name: str, tmp_path: Path) -> None:
    directory = save_tiny_model(name, tmp_path)
    runner, reference = load(directory), Reference(directory)
    errors = {name: reference.largest_error(scenario(runner)) for name, scenario in SCENARIOS.items()}
    assert max(errors.values()) < MAX_ERROR, errors


@pytest.mark.parametrize(("chunk", "floor_scale", "limit"), [(64, 100, 64), (100, 64, 63)])
def test_nested_llama_4_is_served_up_to_its_first_chunk_and_scale(
    chunk: int, floor_scale: int, limit: int, tmp_path: Path
) -> None:
    directory = save_random(llama4(chunk, floor_scale), tmp_path)
    runner, reference = load(directory), Reference(directory)
    assert runner.max_model_len == limit
    errors = {name: reference.largest_error(scenario(runner)) for name, scenario in SCENARIOS.items()}
    assert max(errors.values()) < MAX_ERROR, errors
    with pytest.raises(ModelNotSupported, match=f"set max_model_len to {limit} or less"):
        load(directory, max_model_len=limit + 1)


@pytest.mark.parametrize(("dtype", "max_error"), [("bfloat16", 0.35), ("float16", 0.05)])
def test_half_precision_stays_close_to_float32_and_is_not_called_row_invariant(
    tmp_path: Path, dtype: str, max_error: float
) -> None:
    directory = save_tiny_model("qwen3", tmp_path)
    runner = load(directory, dtype=dtype)
    reference = Reference(directory)
    assert not runner.row_invariant
    errors = {name: reference.largest_error(scenario(runner)) for name, scenario in SCENARIOS.items()}
    assert max(errors.values()) < max_error, errors


def test_llama_like_models_are_fused_unless_switched_off(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    fused, plain = load(directory), load(directory, fused="off")
    assert "fused" in fused.numerics_id
    assert "native" in plain.numerics_id
    assert fused.numerics_id != plain.numerics_id
    assert fused.identity == plain.identity


def test_identity_follows_weights_and_not_the_directory(tmp_path: Path) -> None:
    same = [load(save_tiny_model("llama", tmp_path / name, seed=0)).identity for name in ("a", "b")]
    other = load(save_tiny_model("llama", tmp_path / "c", seed=1)).identity
    assert same[0].weights_digest == same[1].weights_digest != other.weights_digest
    assert same[0].architecture == "LlamaForCausalLM"


def test_identity_follows_what_the_config_computes(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    written = json.loads((directory / "config.json").read_text())

    def digest(**changes: object) -> str:
        (directory / "config.json").write_text(json.dumps({**written, **changes}))
        return load_model(EngineSettings(model=str(directory), device="cpu")).identity.config_digest

    assert digest() == digest(transformers_version="4.0")
    assert digest() != digest(rms_norm_eps=0.5)


def test_dummy_weights_need_no_weight_file(tmp_path: Path) -> None:
    SUPPORTED["qwen2"]().save_pretrained(tmp_path)
    runner = load(tmp_path, load_format="dummy")
    assert runner.identity.weights_digest.startswith("random-")
    assert play.play_alone(runner, TOKENS)


def test_cache_takes_the_blocks_that_its_budget_holds(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    bytes_per_block = 3 * 2 * 2 * 16 * 8 * 4  # layers, keys and values, heads, dim, slots, float32
    runner = load(directory, num_blocks=None, kv_cache_memory_bytes=10 * bytes_per_block + 5)
    assert runner.num_blocks == 10
    with pytest.raises(ModelLoadError, match=r"do not hold two blocks of \d+ bytes; raise it"):
        load(directory, num_blocks=None, kv_cache_memory_bytes=bytes_per_block)


def test_a_directory_without_model_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(tmp_path)


def test_warmup_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    runner = load(save_tiny_model("llama", tmp_path))
    before = play.play_decodes(runner, TOKENS, PROMPT)
    runner.warmup()
    after = play.play_decodes(runner, TOKENS, PROMPT)
    assert all(torch.equal(row, after[path][0]) for path, (row, *_) in before.items())


def test_a_token_outside_the_vocabulary_is_an_error_and_not_a_read_past_the_end(tmp_path: Path) -> None:
    for settings in ({}, {"fused": "off"}):
        runner = load(save_tiny_model("llama", tmp_path), **settings)
        for token in (-1, VOCAB_SIZE):
            player = play.Player(runner)
            player.engine.add([1, token], num_prompt_tokens=2)
            with pytest.raises(IndexError):
                player.step()


def test_a_batch_without_wanted_logits_gives_none(tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        runner = load(save_tiny_model(name, tmp_path / name))
        player = play.Player(runner, max_batch_tokens=16)
        player.engine.add(TOKENS, num_prompt_tokens=len(TOKENS))
        output = player.step()
        assert output is not None
        assert output.logits.shape == (0, runner.num_logits)
