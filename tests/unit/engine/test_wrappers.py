"""The text model of a vision-language checkpoint is served, and nothing else of it is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlavaConfig, LlavaForConditionalGeneration

from specdec.engine.errors import ModelLoadError, ModelNotSupported
from specdec.engine.model.loader import check_tensor_parallel
from specdec.engine.model.runner import ModelRunner
from specdec.engine.parallel.sharding import TensorParallelRefused
from specdec.engine.settings import EngineSettings
from specdec.engine.sublayers import SkippedSublayers
from specdec.engine.tap import FINAL
from tests.support.heads.targets import target_of
from tests.support.zoo.cases import Case
from tests.support.zoo.play import save_model

LLAVA = Case("llava", "LlavaForConditionalGeneration")
QWEN_VL = Case("qwen2_vl", "Qwen2VLForConditionalGeneration")
"""transformers has no class for its text model alone."""
GLM = "Glm4vForConditionalGeneration"
WRAPPERS = pytest.mark.parametrize("case", [LLAVA, QWEN_VL], ids=str)


def load(directory: Path, **settings: Any) -> ModelRunner:
    return ModelRunner.load(EngineSettings(model=str(directory), num_blocks=16, device="cpu", **settings))


def without_vision(directory: Path) -> None:
    """Take the encoder's tensors out of a checkpoint's file."""
    file = directory / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    kept = {name: tensor for name, tensor in load_file(file).items() if "vision_" not in name and "visual" not in name}
    save_file(kept, file, metadata)


@WRAPPERS
def test_weights_of_the_encoder_are_not_read(case: Case, tmp_path: Path) -> None:
    model = save_model(case, tmp_path)
    whole = load(tmp_path)
    without_vision(tmp_path)
    runner = load(tmp_path)
    ids = list(range(3, 30))
    assert torch.equal(runner.likeliest(ids), whole.likeliest(ids))
    assert torch.equal(runner.likeliest(ids), model(input_ids=torch.tensor([ids])).logits[0].argmax(dim=1))
    assert runner.num_parameters < model.num_parameters()


@WRAPPERS
def test_sizes_and_limits_are_the_text_models(case: Case, tmp_path: Path) -> None:
    config = save_model(case, tmp_path).config.get_text_config()
    runner = load(tmp_path)
    assert runner.max_model_len == config.max_position_embeddings
    assert (runner.num_layers, runner.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert runner.eos_token_ids == (config.eos_token_id,)
    runner.check_tap((0, 1, runner.num_layers, FINAL))
    runner.without(SkippedSublayers(attention=frozenset({0})))
    assert load(tmp_path, exit_layer=1).num_layers == 1
    with pytest.raises(ModelLoadError, match=f"exceeds the model's {config.max_position_embeddings} positions"):
        load(tmp_path, max_model_len=config.max_position_embeddings + 1)


@pytest.mark.parametrize(
    "case", [LLAVA, QWEN_VL, Case("gemma3", "Gemma3ForConditionalGeneration"), Case("glm4v", GLM)], ids=str
)
def test_heads_share_the_text_models_embedding_and_output_layer(case: Case, tmp_path: Path) -> None:
    model = save_model(case, tmp_path)
    target, width = target_of(tmp_path), model.config.get_text_config().hidden_size
    assert torch.equal(target.embedding(width), model.get_input_embeddings().weight)
    assert torch.equal(target.lm_head(width), model.get_output_embeddings().weight)


def test_a_text_model_with_a_class_of_its_own_has_its_kernels(tmp_path: Path, native: None) -> None:
    save_model(LLAVA, tmp_path)
    runner = load(tmp_path)
    assert runner.identity.architecture == "LlamaForCausalLM"
    assert "/fused-" in runner.numerics_id


def test_a_wrapper_that_changes_its_text_models_logits_runs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlavaForConditionalGeneration.forward

    def scaled(self: LlavaForConditionalGeneration, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    save_model(LLAVA, tmp_path)
    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", scaled)
    runner = load(tmp_path)
    assert runner.identity.architecture == "LlavaForConditionalGeneration"
    assert runner.num_layers == 2


def test_the_text_models_layers_are_checked(tmp_path: Path) -> None:
    config = LLAVA.config()
    assert isinstance(config, LlavaConfig)
    config.text_config.layer_types = ["full_attention", "linear_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupported, match="linear_attention"):
        load(tmp_path)


def test_several_ranks_are_refused_by_name(tmp_path: Path) -> None:
    save_model(LLAVA, tmp_path)
    with pytest.raises(TensorParallelRefused, match="llava, which wraps its text model"):
        check_tensor_parallel(EngineSettings(model=str(tmp_path), device="cpu", tensor_parallel_size=2))


def test_random_weights_of_a_wrapper_are_those_of_its_text_model(tmp_path: Path) -> None:
    LLAVA.config().save_pretrained(tmp_path)
    assert load(tmp_path, load_format="dummy").identity.architecture == "LlamaForCausalLM"
