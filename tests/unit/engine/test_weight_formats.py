"""Weights are packed in the smallest format that holds them exactly, and no bit of a result depends on which it is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.engine.model.fused import FusedDecoder
from specdec.engine.model.runner import ModelRunner
from specdec.engine.native.kernels import NativeKernels
from specdec.engine.native.packing import WeightFormat, WeightPacking
from specdec.engine.settings import EngineSettings
from tests.support.engine import paged_scenarios as play
from tests.support.engine.kernel_variants import runnable_variants
from tests.support.engine.paged_attention import random_rows
from tests.support.engine.tiny_models import VOCAB_SIZE, save_tiny_model

SIZES = [(1, 1), (15, 3), (33, 7), (64, 64), (131, 100), (271, 129)]
TOKENS = play.random_tokens(45, 1, VOCAB_SIZE)
MODELS = {
    "fused": ("llama", {}),
    "fused, with biases": ("llama_yarn_bias", {}),
    "fused, tied embedding": ("qwen2", {}),
    "native": ("gemma2", {}),
    "native, fusable": ("mistral", {"fused": "off"}),
    "native, transposed weights": ("gpt2", {}),
}


@pytest.fixture(params=runnable_variants())
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels that are made from here on are this variant's."""
    name: str = request.param
    monkeypatch.setenv("SPECDEC_NATIVE_ISA", name)
    return name


@pytest.fixture
def packing_float32(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, all weights are packed as float32."""
    return lambda: monkeypatch.setattr(WeightPacking, "fits", lambda _self, _weight, each: each == WeightFormat.FLOAT32)


def bfloat16_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random float32 numbers that bfloat16 holds, zeros of both signs, subnormal and large ones among them."""
    numbers = random_rows(*shape, seed=seed).bfloat16().float()
    special = torch.tensor([0.0, -0.0, 2.0**-130, -(2.0**-133), 2.0**60, -(2.0**60)])
    places = numbers.view(-1)[:: -(-numbers.numel() // len(special))]
    places.copy_(special[: len(places)])
    return numbers


@pytest.mark.parametrize(("num_outputs", "depth"), SIZES)
def test_a_product_with_bfloat16_weights_has_the_bits_of_float32_weights(
    variant: str, packing_float32: Callable[[], None], num_outputs: int, depth: int
) -> None:
    kernels = [NativeKernels(num_threads) for num_threads in (1, 2)]
    weight, bias = bfloat16_rows(num_outputs, depth), random_rows(num_outputs, seed=1)
    packed = [each.pack(weight, bias) for each in kernels]
    packing_float32()
    reference = kernels[0].pack(weight, bias)
    assert kernels[0].variant == variant
    assert {each.view.format for each in packed} == {WeightFormat.BFLOAT16}
    assert reference.view.format == WeightFormat.FLOAT32
    rows = random_rows(20, depth, seed=2)
    for count in range(1, 21):
        expected = reference(rows[:count])
        assert all(torch.equal(each(rows[:count]), expected) for each in packed), count


@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_bfloat16_weights_has_the_logits_of_float32_weights(
    variant: str, packing_float32: Callable[[], None], model: str, tmp_path: Path
) -> None:
    name, settings = MODELS[model]
    directory = save_tiny_model(name, tmp_path, dtype=torch.bfloat16)
    small = load(directory, **settings)
    packing_float32()
    large = load(directory, **settings)
    assert small.numerics_id == large.numerics_id
    assert variant in small.numerics_id
    assert model.split(",")[0] in small.numerics_id
    for ways in (play.play_alone, lambda runner, tokens: play.play_trees(runner, tokens, 21, tokens[:9])):
        logs = [ways(runner, TOKENS) for runner in (small, large)]
        assert logs[0].keys() == logs[1].keys()
        for path, rows in logs[0].items():
            assert all(torch.equal(a, b) for a, b in zip(rows, logs[1][path], strict=True)), len(path)


@pytest.mark.parametrize("place", [(0, 0), (130, 99), (64, 3)])
def test_a_weight_with_one_number_that_bfloat16_lacks_stays_float32(place: tuple[int, int]) -> None:
    kernels = NativeKernels(1)
    weight = bfloat16_rows(131, 100)
    weight[place] = 1 + 2.0**-23
    packed = kernels.pack(weight, None)
    assert packed.view.format == WeightFormat.FLOAT32
    assert packed(torch.eye(100))[place[1], place[0]] == 1 + 2.0**-23


def test_weights_that_alternate_are_bfloat16_if_all_are() -> None:
    packing = NativeKernels(1).packing
    exact, inexact = bfloat16_rows(8, 8), random_rows(8, 8)
    assert packing.format_of([exact, exact]) == WeightFormat.BFLOAT16
    assert packing.format_of([exact, inexact]) == packing.format_of([inexact, exact]) == WeightFormat.FLOAT32


def test_bfloat16_weights_take_half_the_memory(packing_float32: Callable[[], None], tmp_path: Path) -> None:
    kernels = NativeKernels(1)
    sizes = [kernels.pack(bfloat16_rows(640, 384), None).panels.numel()]
    arenas = [arena_bytes(save_tiny_model("llama_wide_heads", tmp_path, dtype=torch.bfloat16))]
    packing_float32()
    sizes.append(kernels.pack(bfloat16_rows(640, 384), None).panels.numel())
    arenas.append(arena_bytes(tmp_path))
    assert sizes == [640 * 384 * 2, 640 * 384 * 4]
    assert arenas[1] == 2 * arenas[0]


def test_a_model_may_mix_formats(tmp_path: Path, packing_float32: Callable[[], None]) -> None:
    directory = save_tiny_model("llama", tmp_path, dtype=torch.bfloat16)
    file = directory / "model.safetensors"
    weights = {name: weight.float() for name, weight in load_file(file).items()}
    for name in ("0.self_attn.k_proj", "1.mlp.up_proj", "2.mlp.down_proj"):
        weights[f"model.layers.{name}.weight"][-1, -1] = 1 / 3
    save_file(weights, file, {"format": "pt"})
    runners = [load(directory)]
    packing_float32()
    runners.append(load(directory))
    mixed, plain = (play.play_alone(runner, TOKENS) for runner in runners)
    assert all(torch.equal(rows[0], plain[path][0]) for path, rows in mixed.items())


def load(directory: Path, **settings: object) -> ModelRunner:
    base = {"model": str(directory), "device": "cpu", "num_blocks": 64, "block_size": 8, "deterministic": True}
    return ModelRunner.load(EngineSettings.model_validate({**base, **settings}))


def arena_bytes(directory: Path) -> int:
    step_model = load(directory)._step_model
    assert isinstance(step_model, FusedDecoder)
    return step_model.arena.num_bytes
