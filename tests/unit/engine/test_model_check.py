"""Models that the engine cannot page are refused at load, with a reason; real tiny models throughout."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Phi3Config, dynamic_module_utils
from transformers.models.llama import modeling_llama as llama_module
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

from specdec.engine.errors import ModelLoadError, ModelNotSupported
from specdec.engine.model.loader import load_model
from specdec.engine.model.model_check import check_config
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine.tiny_models import REFUSED, SUPPORTED, SWITCHED, llama4, save_random, save_tiny_model

REASONS = {
    "falcon": "does not use transformers' attention interface",
    "gptj": "does not use transformers' attention interface",
    "bloom": "does not use transformers' attention interface",
    "recurrent_gemma": "linear_attention keep state .* has no such state",
    "t5": "encoder-decoder",
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


def load(directory: Path, **settings: Any) -> ModelRunner:
    defaults: dict[str, Any] = {"model": str(directory), "num_blocks": 16, "device": "cpu"}
    return ModelRunner.load(EngineSettings.model_validate({**defaults, **settings}))


@pytest.mark.parametrize("name", list(REFUSED))
def test_unpageable_model_is_refused_with_a_reason_before_weights_are_read(name: str, tmp_path: Path) -> None:
    directory = save_tiny_model(name, tmp_path)
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotSupported, match=REASONS[name]) as refusal:
        load(directory)
    assert refusal.value.reason in str(refusal.value)


def test_hybrid_layers_are_refused_before_weights_are_read() -> None:
    config = LlamaConfig()
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelNotSupported, match="linear_attention"):
        check_config(config)


def test_the_text_model_of_a_wrapper_is_checked() -> None:
    config = llama4(chunk=48, floor_scale=100)
    config.text_config.layer_types = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    with pytest.raises(ModelNotSupported, match="linear_attention"):
        check_config(config)


def test_what_the_loaded_model_was_made_from_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_tiny_model("llama", tmp_path)
    plain = LlamaForCausalLM.__init__

    def init(self: LlamaForCausalLM, config: LlamaConfig, *args: Any, **kwargs: Any) -> None:
        plain(self, config, *args, **kwargs)
        self.config.layer_types = ["linear_attention"] * 3

    monkeypatch.setattr(LlamaForCausalLM, "__init__", init)
    with pytest.raises(ModelNotSupported, match="linear_attention"):
        load(directory)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"bias_per_head": 1.0}, "asks its attention for bias_per_head"),
        ({"is_causal": False}, "asks its attention for no causal mask"),
    ],
)
def test_a_keyword_that_attention_does_not_know_is_refused(
    extra: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny_model("llama", tmp_path)
    plain = LlamaAttention.forward

    def asking(self: LlamaAttention, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs, **extra)

    monkeypatch.setattr(LlamaAttention, "forward", asking)
    with pytest.raises(ModelNotSupported, match=reason):
        load(directory, self_test=False)


def test_a_mask_that_is_no_window_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third key is left out, from a position on that the self-test does not reach."""
    directory = save_tiny_model("llama", tmp_path)
    plain = llama_module.create_causal_mask

    def gappy(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs, and_mask_function=lambda batch, head, q, kv: (kv % 3 != 1) | (q < 100))

    monkeypatch.setattr(llama_module, "create_causal_mask", gappy)
    with pytest.raises(ModelNotSupported, match="not causal at position"):
        load(directory)


def test_a_scale_by_the_place_in_the_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step comes after 100 tokens; the self-test has 37, and moves it."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=131, num_hidden_layers=2, sliding_window=100, initializer_range=0.2, **sizes)
    directory = save_random(config, tmp_path)
    plain = MistralAttention.forward

    def scaled(self: MistralAttention, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        places = torch.ones(hidden_states.shape[1]).cumsum(0) - 1
        scale = torch.log1p(torch.floor(places / self.config.sliding_window)) + 1
        return plain(self, hidden_states * scale[None, :, None], *args, **kwargs)

    monkeypatch.setattr(MistralAttention, "forward", scaled)
    with pytest.raises(ModelNotSupported, match="beyond its windows"):
        load(directory)


def longrope_model(directory: Path) -> Path:
    config = Phi3Config(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        pad_token_id=0,
        rope_parameters=LONGROPE,
    )
    config.save_pretrained(directory)
    return directory


def test_longrope_is_pinned_to_lengths_that_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    directory = longrope_model(tmp_path)
    assert load(directory, load_format="dummy").max_model_len == 64
    with pytest.raises(ModelNotSupported, match="longrope"):
        load(directory, load_format="dummy", max_model_len=65)


def test_longropes_switch_stands_beside_its_parameters_in_some_configs(tmp_path: Path) -> None:
    directory = longrope_model(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    rope = {key: value for key, value in config["rope_parameters"].items() if "original" not in key}
    changes = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_parameters": rope}
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    assert load(directory, load_format="dummy").max_model_len == 64


def test_dynamic_rope_is_pinned_to_lengths_that_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    config = SUPPORTED["llama"]()
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    directory = save_random(config, tmp_path)
    assert load(directory).max_model_len == 160
    with pytest.raises(ModelNotSupported, match=r"dynamic rope.* set max_model_len to 160 or less"):
        load(directory, max_model_len=161)


def test_hidden_state_outside_attention_shows_in_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that looks fine to every other check, but mixes neighbouring rows in its layers."""
    directory = save_tiny_model("llama", tmp_path)
    plain = LlamaAttention.forward

    def mixing(self: LlamaAttention, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(self, hidden_states + 0.5 * hidden_states.roll(1, dims=1), *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", mixing)
    with pytest.raises(ModelNotSupported, match="depend on the rest of the batch"):
        load(directory, fused="off")


def test_dense_attention_that_is_no_paged_attention_shows_in_the_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny_model("llama", tmp_path)
    plain = llama_module.eager_attention_forward

    def flatter(*args: Any, scaling: float, **kwargs: Any) -> Any:
        return plain(*args, scaling=scaling / 2, **kwargs)

    monkeypatch.setattr(llama_module, "eager_attention_forward", flatter)
    with pytest.raises(ModelNotSupported, match="paged logits differ"):
        load(directory, fused="off")


def test_a_layer_that_skips_the_registered_function_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_tiny_model("llama", tmp_path)
    plain = LlamaAttention.forward

    def skipping(self: LlamaAttention, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == 1:
            return hidden_states, None
        return plain(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", skipping)
    with pytest.raises(ModelNotSupported, match="only 2 of its 3 layers"):
        load(directory)


def test_a_fused_decoder_that_computes_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_tiny_model("llama", tmp_path)
    plain = LlamaForCausalLM.forward

    def scaled(self: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    runner = load(directory)
    assert "native" in runner.numerics_id
    assert "failed its self-test" in caplog.text


def test_every_supported_config_passes_the_static_checks() -> None:
    for make in (*SUPPORTED.values(), *SWITCHED.values()):
        check_config(make())


def with_code(directory: Path, auto_class: str) -> Path:
    """Give a model's folder code of its own for one of transformers' classes; returns what that leaves when it runs."""
    trace = directory / "code-ran"
    (directory / "of_the_repository.py").write_text(f"""
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

Path({str(trace)!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    pass
""")
    config = json.loads((directory / "config.json").read_text())
    own = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnModel"}[auto_class]
    config["auto_map"] = {auto_class: f"of_the_repository.{own}"}
    if auto_class == "AutoConfig":
        config["model_type"] = "own"
    (directory / "config.json").write_text(json.dumps(config))
    return trace


def test_a_model_that_needs_its_repositorys_code_is_refused_and_the_code_is_not_run(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    trace = with_code(directory, "AutoConfig")
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        load_model(EngineSettings(model=str(directory), device="cpu"))
    assert not trace.exists()


@pytest.mark.parametrize("allowed", [False, True])
def test_code_beside_a_known_model_is_run_only_if_that_is_allowed(
    tmp_path: Path, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny_model("llama", tmp_path / "model")
    trace = with_code(directory, "AutoModelForCausalLM")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    loaded = load_model(EngineSettings(model=str(directory), device="cpu", trust_remote_code=allowed))
    assert loaded.identity.architecture == ("OwnModel" if allowed else "LlamaForCausalLM")
    assert trace.exists() == allowed


def test_weights_that_are_pickled_are_refused(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    weights = load_model(EngineSettings(model=str(directory), device="cpu")).model.state_dict()
    torch.save(weights, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        load_model(EngineSettings(model=str(directory), device="cpu"))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("/nowhere/model", "model: no such directory: /nowhere/model"),
        ("./nowhere", "model: no such directory: ./nowhere"),
        ("nobody/nothing", "model: nobody/nothing is neither a directory nor available from the hub"),
        (str(Path(__file__).parent), "has no config.json"),
    ],
)
def test_a_model_that_is_not_there_is_refused_with_the_settings_name(model: str, why: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(why)):
        load_model(EngineSettings(model=model, device="cpu"))


@pytest.mark.parametrize(
    ("field", "size"),
    [("num_hidden_layers", 10**6), ("max_position_embeddings", 10**12), ("vocab_size", 10**9), ("hidden_size", -1)],
)
def test_a_size_that_no_model_has_is_refused_before_anything_is_allocated(field: str, size: int) -> None:
    config = LlamaConfig()
    setattr(config, field, size)
    with pytest.raises(ModelNotSupported, match=f"{field} is {size}"):
        check_config(config)


def test_weights_that_are_not_numbers_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = LlamaForCausalLM.from_pretrained(save_tiny_model("llama", tmp_path))
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    load(tmp_path, self_test=False)
    assert "1 weights hold NaN or infinity: model.layers.1.mlp.up_proj.weight" in caplog.text
