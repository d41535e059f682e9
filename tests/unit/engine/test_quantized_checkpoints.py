"""Checkpoints that are quantized already: used where transformers can, refused with a reason elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from specdec.engine.attention.torch_kernels import TiledAttention
from specdec.engine.checkpoints.formats import check_format, format_of
from specdec.engine.errors import ModelLoadError
from specdec.engine.model import loader
from specdec.engine.model.fused import is_fusable
from specdec.engine.model.loader import load_model
from specdec.engine.model.proofs.probe import SelfTest
from specdec.engine.model.ragged import RaggedModel
from specdec.engine.settings import EngineSettings
from tests.support.engine.tiny_models import save_tiny_model

FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 32},
    "awq": {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {}},
    "bitsandbytes": {"load_in_4bit": True},
}
CUDA = torch.device("cuda", 0)


def quantized(directory: Path, name: str) -> Path:
    """A checkpoint that says that it is; its weights are what they were."""
    save_tiny_model("llama", directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": name, **FORMATS[name]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", FORMATS)
def test_on_the_cpu_one_is_refused_and_told_what_to_give_instead(tmp_path: Path, name: str) -> None:
    directory = quantized(tmp_path, name)
    with pytest.raises(ModelLoadError, match=rf"is quantized \({name}\) and needs CUDA; .*weight_quantization"):
        load_model(EngineSettings(model=str(directory), device="cpu"))


@pytest.mark.parametrize("name", FORMATS)
def test_its_format_is_known_from_its_config_alone(tmp_path: Path, name: str) -> None:
    config = AutoConfig.from_pretrained(quantized(tmp_path, name))
    assert check_format(config, EngineSettings(model="m"), CUDA) == name
    assert format_of(AutoConfig.from_pretrained(save_tiny_model("llama", tmp_path / "plain"))) == ""


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"load_format": "dummy"}, "load_format"),
        ({"deterministic": True}, "deterministic"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], field: str) -> None:
    config = AutoConfig.from_pretrained(quantized(tmp_path, "gptq"))
    with pytest.raises(ModelLoadError, match=rf"^{field}: .*gptq"):
        check_format(config, EngineSettings(model="m", **settings), CUDA)


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for its packages before it asks for a GPU."""
    monkeypatch.setattr(loader, "check_format", lambda config, *_: format_of(config))
    directory = quantized(tmp_path, "gptq")
    with pytest.raises(ModelLoadError, match=r"could not be loaded: .*(gptqmodel|optimum)"):
        load_model(EngineSettings(model=str(directory), device="cpu"))


def test_its_modules_are_not_taken_apart_by_the_engines_own_decoders(tmp_path: Path) -> None:
    loaded = load_model(EngineSettings(model=str(save_tiny_model("llama", tmp_path)), device="cpu"))
    probe = SelfTest(loaded.vocab_size, loaded.max_model_len, 16, loaded.device)
    recorded = RaggedModel(loaded.model, TiledAttention()).record_attention(probe)
    assert is_fusable(loaded.model, recorded.geometries, recorded.options, 256)
    loaded.model.config.quantization_config = {"quant_method": "gptq"}
    assert not is_fusable(loaded.model, recorded.geometries, recorded.options, 256)


def test_a_checkpoint_that_lacks_weights_is_refused_and_not_made_up(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(EngineSettings(model=str(directory), device="cpu"))
