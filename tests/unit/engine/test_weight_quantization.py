"""Quantized models: rounded float32 weights, which the kernels hold in few bits and multiply to the same bit."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from specdec.engine.checkpoints.rounding import quantize_linear_weights, round_to_int4, round_to_int8
from specdec.engine.errors import ModelLoadError
from specdec.engine.model.fused import FusedDecoder
from specdec.engine.model.runner import ModelRunner
from specdec.engine.native.kernels import NativeKernels
from specdec.engine.native.packing import FORMATS_OF_QUANTIZED, INT4_GROUP, WeightFormat
from specdec.engine.settings import EngineSettings
from tests.support.engine import paged_scenarios as play
from tests.support.engine.kernel_variants import runnable_variants
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.paged_attention import random_rows
from tests.support.engine.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.for_each import for_each

SIZES = [(1, 1), (15, 3), (33, 7), (64, 64), (131, 100), (271, 129)]
ROUNDED = {"int8": (round_to_int8, WeightFormat.INT8), "int4": (round_to_int4, WeightFormat.INT4)}
TOKENS = play.random_tokens(45, 1, VOCAB_SIZE)


@pytest.fixture(params=runnable_variants())
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels that are made from here on are this variant's."""
    name: str = request.param
    monkeypatch.setenv("SPECDEC_NATIVE_ISA", name)
    return name


def weight_of(num_outputs: int, depth: int) -> torch.Tensor:
    """Outputs of very different sizes, one of them all zeros, and a number beside much larger ones."""
    weight = random_rows(num_outputs, depth) * torch.logspace(-20, 10, num_outputs)[:, None]
    weight[num_outputs // 2] = 0
    weight[-1, 0] = 1e6
    return weight


@for_each("kind", ROUNDED)
@for_each("num_outputs, depth", SIZES)
def test_a_product_with_quantized_weights_has_the_bits_of_the_rounded_float32_weights(
    variant: str, kind: str, num_outputs: int, depth: int
) -> None:
    rounded, weight_format = ROUNDED[kind]
    weight, bias = rounded(weight_of(num_outputs, depth)), random_rows(num_outputs, seed=1)
    packed = [NativeKernels(n, FORMATS_OF_QUANTIZED[1 if kind == "int8" else 0 :]).pack(weight, bias) for n in (1, 2)]
    reference = NativeKernels(1, [WeightFormat.FLOAT32]).pack(weight, bias)
    assert reference.view.format == WeightFormat.FLOAT32
    assert {each.view.format for each in packed} == {weight_format}
    rows = random_rows(20, depth, seed=2)
    for count in range(1, 21):
        expected = reference(rows[:count])
        assert torch.equal(expected, reference(rows)[:count])
        assert all(torch.equal(each(rows[:count]), expected) for each in packed), count


def test_rounding_is_as_near_as_its_steps_allow_and_changes_nothing_twice() -> None:
    weight = weight_of(40, 100)
    eight, four = round_to_int8(weight), round_to_int4(weight)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((eight - weight).abs() <= step * 0.51).all())
    groups = torch.nn.functional.pad(weight, (0, -100 % INT4_GROUP)).view(40, -1, INT4_GROUP)
    step = (groups.abs().amax(dim=2, keepdim=True) / 8).expand_as(groups).reshape(40, -1)[:, :100]
    assert bool(((four - weight).abs() <= step * 1.01).all())
    assert torch.equal(round_to_int8(eight), eight)
    assert torch.equal(round_to_int4(four), four)


def test_quantized_weights_take_a_quarter_and_less_than_a_seventh_of_the_memory() -> None:
    sizes = {}
    for kind, (rounded, _) in ROUNDED.items():
        packed = NativeKernels(1, FORMATS_OF_QUANTIZED).pack(rounded(random_rows(640, 384)), None)
        sizes[kind] = packed.panels.numel()
    assert sizes["int8"] == 640 * 384 + 640 * 4
    assert sizes["int4"] == 640 * 384 // 2 + 640 * 384 // INT4_GROUP * 2


def test_weights_that_were_not_asked_to_be_quantized_never_are() -> None:
    assert NativeKernels(1).pack(torch.zeros(64, 64), None).view.format == WeightFormat.BFLOAT16
    assert NativeKernels(1).pack(round_to_int8(random_rows(64, 64)), None).view.format == WeightFormat.FLOAT32


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2"])
def test_a_quantized_model_is_the_model_with_rounded_weights(kind: str, name: str, tmp_path: Path) -> None:
    """To the bit, in any company; the output layer of int4 has 8 bits, and an embedding stays what it is."""
    directory = save_tiny_model(name, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight.clone()
    quantize_linear_weights(model, "int8" if kind == "int8" else "int4")
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert torch.equal(round_to_int8(model.lm_head.weight), model.lm_head.weight)
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "rounded")
    runner, reference = load(directory, weight_quantization=kind), load(tmp_path / "rounded")
    expected = play.play_alone(reference, TOKENS)
    for log in (play.play_alone(runner, TOKENS), play.play_alone(runner, TOKENS, max_batch_tokens=1)):
        assert all(torch.equal(rows[0], expected[path][0]) for path, rows in log.items())


def test_numerics_of_quantized_models_have_ids_of_their_own(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    ids = {load(directory, weight_quantization=kind).numerics_id for kind in ("none", "int8", "int4")}
    assert len(ids) == 3
    assert "int8" not in load(directory).numerics_id


def test_a_quantized_fused_model_takes_less_memory(tmp_path: Path) -> None:
    directory = save_tiny_model("llama_wide_heads", tmp_path, dtype=torch.bfloat16)
    sizes = []
    for kind in ("none", "int8", "int4"):
        step_model = load(directory, weight_quantization=kind)._step_model
        assert isinstance(step_model, FusedDecoder)
        sizes.append(step_model.arena.num_bytes)
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.7 * sizes[1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"native": "off"}, "native is off"), ({"tensor_parallel_size": 2}, "tensor_parallel_size 1")],
)
def test_settings_that_rule_quantization_out_are_refused_by_name(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=f"weight_quantization needs .*{reason}"):
        EngineSettings.model_validate({"model": "m", "weight_quantization": "int8", **settings})


def test_other_numbers_than_float32_and_machines_without_kernels_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny_model("llama", tmp_path)
    with pytest.raises(ModelLoadError, match="weight_quantization: int8 needs float32 on the CPU, not bfloat16 on cpu"):
        load(directory, weight_quantization="int8", dtype="bfloat16", deterministic=None)
    monkeypatch.setenv("SPECDEC_NATIVE_ISA", "none")
    with pytest.raises(ModelLoadError, match="weight_quantization: needs native kernels"):
        load(directory, weight_quantization="int8")


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model("llama", tmp_path), dtype=torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.inf
    with pytest.raises(ModelLoadError, match=r"weight_quantization: model\.layers\.1\.mlp\.up_proj has weights"):
        quantize_linear_weights(model, "int8")


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_quantized_draft_changes_no_token_and_is_still_right(kind: str) -> None:
    bodies = {
        str(i): open_session(prompt[:40], temperature=float(i % 2), seed=i, max_tokens=32)
        for i, prompt in enumerate(prompts()[:4])
    }
    pair = LocalPair(draft_options={"weight_quantization": kind})
    fast = pair.run(bodies)
    pair.reset()
    plain = pair.run(bodies, use_draft=False)
    assert [each.token_ids for each in fast.values()] == [each.token_ids for each in plain.values()]
    assert sum(each.num_accepted for each in fast.values()) > 20


def load(directory: Path, **settings: object) -> ModelRunner:
    base = {"model": str(directory), "device": "cpu", "num_blocks": 64, "block_size": 8, "deterministic": True}
    return ModelRunner.load(EngineSettings.model_validate({**base, **settings}))
