"""Checkpoints in the common forms of 8 bits: served with the very logits of the plain weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.engine.errors import ModelLoadError
from specdec.engine.model.loader import load_model
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine import paged_scenarios as play
from tests.support.engine.mixtures import MIXTURES
from tests.support.engine.tiny_models import VOCAB_SIZE, save_random, save_tiny_model

E4M3, MOST = torch.float8_e4m3fn, 448.0
BLOCK = (24, 40)
"""Sizes that divide no weight's."""
TOKENS = play.random_tokens(9, 5, VOCAB_SIZE)

Scaled = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Numbers, scales as they are stored, and the weight that they stand for."""


def per_tensor(weight: torch.Tensor) -> Scaled:
    scale = weight.abs().max() / MOST
    numbers = (weight / scale).to(E4M3)
    return numbers, scale.view(1), numbers.float() * scale


def per_output(weight: torch.Tensor) -> Scaled:
    scales = weight.abs().amax(-1, keepdim=True) / MOST
    numbers = (weight / scales).to(E4M3)
    return numbers, scales, numbers.float() * scales


def per_block(weight: torch.Tensor) -> Scaled:
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    numbers, plain = torch.empty_like(weight).to(E4M3), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight[part].abs().max() / MOST
            numbers[part] = (weight[part] / scales[i, j]).to(E4M3)
            plain[part] = numbers[part].float() * scales[i, j]
    return numbers, scales, plain


def _group(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    return {"format": "float-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


FORMS: dict[str, tuple[Callable[[torch.Tensor], Scaled], str, dict[str, Any]]] = {
    "per tensor, AutoFP8": (per_tensor, "_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    "per tensor, compressed-tensors": (
        per_tensor, "_scale", {"quant_method": "compressed-tensors", **_group("tensor")}
    ),
    "per tensor, ModelOpt": (per_tensor, "_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "per output, compressed-tensors": (
        per_output, "_scale", {"quant_method": "compressed-tensors", **_group("channel")}
    ),
    "per output, FBGEMM": (per_output, "_scale", {"quant_method": "fbgemm_fp8"}),
    "per block, DeepSeek and Qwen3": (
        per_block, "_scale_inv", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    ),
    "per block, compressed-tensors": (
        per_block,
        "_scale",
        {"quant_method": "compressed-tensors", **_group("block", block_structure=list(BLOCK))},
    ),
}  # fmt: skip


def save_both(folder: Path, form: str, architecture: str = "llama") -> tuple[Path, Path]:
    """A checkpoint in 8 bits, and the plain one of the same weights."""
    scaled, end, described = FORMS[form]
    plain = folder / "plain"
    if architecture in MIXTURES:
        save_random(MIXTURES[architecture](), plain)
    else:
        save_tiny_model(architecture, plain)
    weights = load_file(plain / "model.safetensors")
    stored = dict(weights)
    for name, weight in weights.items():
        if name.endswith("_proj.weight") or ".experts." in name:
            stored[name], stored[name + end], weights[name] = scaled(weight.float())
            if described.get("activation_scheme") == "static":
                stored[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    packed = folder / "packed"
    packed.mkdir()
    for file in plain.iterdir():
        (packed / file.name).write_bytes(file.read_bytes())
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    return packed, plain


def logits_of(folder: Path, **settings: Any) -> tuple[ModelRunner, torch.Tensor]:
    given = {"model": str(folder), "device": "cpu", "num_blocks": 32, "max_model_len": 64, **settings}
    runner = ModelRunner.load(EngineSettings.model_validate(given))
    log = play.play_alone(runner, TOKENS)
    return runner, torch.stack([log[tuple(TOKENS[: i + 1])][0] for i in range(len(TOKENS))])


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_has_the_logits_of_its_dequantized_weights(form: str, tmp_path: Path) -> None:
    packed, plain = save_both(tmp_path, form)
    runner, found = logits_of(packed, deterministic=True)
    reference, expected = logits_of(plain)
    assert torch.equal(found, expected)
    assert runner.numerics_id == reference.numerics_id
    assert runner.identity.weights_digest != reference.identity.weights_digest
    assert runner.fused is not None


def test_experts_are_read_like_plain_ones(tmp_path: Path) -> None:
    packed, plain = save_both(tmp_path, "per block, DeepSeek and Qwen3", "qwen3_moe")
    assert torch.equal(logits_of(packed)[1], logits_of(plain)[1])


def test_weights_may_be_rounded_again(tmp_path: Path) -> None:
    packed, plain = save_both(tmp_path, "per output, compressed-tensors")
    found, expected = (logits_of(folder, weight_quantization="int8")[1] for folder in (packed, plain))
    assert torch.equal(found, expected)


def test_only_the_files_of_the_index_are_read(tmp_path: Path) -> None:
    packed, plain = save_both(tmp_path, "per tensor, AutoFP8")
    weights = load_file(packed / "model.safetensors")
    (packed / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, packed / file, metadata={"format": "pt"})
    save_file({names[0]: torch.zeros(3)}, packed / "consolidated.safetensors")
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (packed / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits_of(packed)[1], logits_of(plain)[1])


def damaged(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], form: str) -> EngineSettings:
    packed, _ = save_both(folder, form)
    weights = load_file(packed / "model.safetensors")
    change(weights)
    save_file(weights, packed / "model.safetensors", metadata={"format": "pt"})
    return EngineSettings(model=str(packed), device="cpu")


NAME = "model.layers.0.mlp.up_proj.weight"


def test_weights_without_scales_are_refused_by_name(tmp_path: Path) -> None:
    settings = damaged(tmp_path, lambda weights: weights.pop(f"{NAME}_scale"), "per tensor, AutoFP8")  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelLoadError, match=rf"has {NAME} in 8 bits and no {NAME}_scale"):
        load_model(settings)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            torch.ones(3, 2),
            r"has scales of shape \[3, 2\]: neither one, nor one per output, nor one per block of 0 x 0",
        ),
        (torch.ones(7), r"scales of shape \[7\]"),
        (torch.ones(1, dtype=torch.int32), "scales of torch.int32"),
        (torch.empty(0), r"scales of shape \[0\]"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(scales: torch.Tensor, message: str, tmp_path: Path) -> None:
    settings = damaged(tmp_path, lambda weights: weights.update({f"{NAME}_scale": scales}), "per output, FBGEMM")
    with pytest.raises(ModelLoadError, match=rf"^model: {NAME} .*{message}"):
        load_model(settings)


@pytest.mark.parametrize("sizes", [[128], [0.5, 2], "128x128", [-1, 8], {"a": 1}])
def test_blocks_of_other_than_two_sizes_are_refused(sizes: object, tmp_path: Path) -> None:
    packed, _ = save_both(tmp_path, "per tensor, AutoFP8")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = sizes
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelLoadError, match=r"quantization_config names blocks of .*, not of two sizes|no usable config"
    ):
        load_model(EngineSettings(model=str(packed), device="cpu"))


def test_ranks_are_refused(tmp_path: Path) -> None:
    packed, _ = save_both(tmp_path, "per tensor, AutoFP8")
    with pytest.raises(ModelLoadError, match=r"tensor_parallel_size: .* has weights of 8 bits; set 1"):
        load_model(EngineSettings(model=str(packed), device="cpu", tensor_parallel_size=2))
