"""Mixtures of experts on CPU float32: transformers' logits, and the same bits in any company."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.engine.errors import ModelNotSupported
from specdec.engine.model.linear import TorchWeight
from specdec.engine.model.mixtures.functions import InvariantFunctions
from specdec.engine.model.mixtures.routes import Routes
from specdec.engine.model.mixtures.weights import (
    ExpertsPacker,
    ExpertWeights,
    PackedExperts,
    TorchExperts,
    native_experts,
)
from specdec.engine.model.runner import ModelRunner
from specdec.engine.native.kernels import KERNEL_VERSION, NativeKernels
from specdec.engine.settings import EngineSettings
from specdec.engine.sublayers import SkippedSublayers
from tests.support.engine import paged_scenarios as play
from tests.support.engine.exactness import TOKENS, check_exactness
from tests.support.engine.mixtures import MIXTURES
from tests.support.engine.paged_attention import random_rows
from tests.support.engine.tiny_models import save_random
from tests.support.for_each import for_each


@pytest.mark.parametrize("name", list(MIXTURES))
def test_a_mixture_has_the_logits_of_transformers_and_the_same_bits_in_any_company(name: str, tmp_path: Path) -> None:
    check_exactness(MIXTURES[name](), tmp_path, native="on")


@pytest.mark.parametrize("name", list(MIXTURES))
def test_a_mixture_without_a_compiler_has_them_too(name: str, tmp_path: Path) -> None:
    assert "onednn" in check_exactness(MIXTURES[name](), tmp_path, native="off").numerics_id


def test_mixtures_have_a_numerics_id_of_their_own(tmp_path: Path) -> None:
    save_random(MIXTURES["qwen3_moe"](), tmp_path)
    runner = ModelRunner.load(EngineSettings(model=str(tmp_path), device="cpu", num_blocks=16, native="on"))
    assert "-experts-1/" in runner.numerics_id


@pytest.mark.parametrize("is_normalized", [True, False])
def test_the_fused_decoder_takes_mixtures_beside_dense_layers_with_the_same_bits_for_any_threads(
    is_normalized: bool, tmp_path: Path
) -> None:
    config = MIXTURES["qwen3_moe"]()
    config.num_hidden_layers, config.mlp_only_layers, config.norm_topk_prob = 3, [1], is_normalized
    fused = check_exactness(config, tmp_path, native="on")
    assert f"fused-{KERNEL_VERSION}-" in fused.numerics_id
    settings = {"model": str(tmp_path), "device": "cpu", "num_blocks": 96, "max_model_len": 128}
    expected = play.play_alone(fused, TOKENS)
    for others in ({"num_threads": 3}, {"fused": "off"}):
        runner = ModelRunner.load(EngineSettings.model_validate({**settings, **others}))
        for path, rows in play.play_alone(runner, TOKENS).items():
            if "fused" in others:
                torch.testing.assert_close(rows[0], expected[path][0], rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(rows[0], expected[path][0]), len(path)


@torch.inference_mode()
def test_a_fused_mixture_skips_sublayers_as_its_modules_do(tmp_path: Path) -> None:
    save_random(MIXTURES["mixtral"](), tmp_path)
    found = []
    for fused in ("auto", "off"):
        settings = {"model": str(tmp_path), "device": "cpu", "num_blocks": 16, "fused": fused, "num_threads": 1}
        runner = ModelRunner.load(EngineSettings.model_validate(settings))
        skipped = runner.without(SkippedSublayers(attention=frozenset({0}), mlp=frozenset({1})))
        found.append(runner.likeliest(TOKENS, skipped.step_model))
    assert torch.equal(*found)


def mixture(num_experts: int, hidden: int, inner: int, *, is_gated: bool) -> ExpertWeights:
    """Random weights; with biases unless gated."""
    up_width = 2 * inner

    def stacked(*shape: int, seed: int) -> torch.Tensor:
        return random_rows(num_experts * shape[0], *shape[1:], seed=seed).view(num_experts, *shape)

    return ExpertWeights(
        up=stacked(up_width, hidden, seed=1),
        down=stacked(hidden, inner, seed=2),
        up_bias=None if is_gated else stacked(up_width, seed=3),
        down_bias=None if is_gated else stacked(hidden, seed=4),
        is_gated=is_gated,
    )


def activate(up: torch.Tensor) -> torch.Tensor:
    gate, other = up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * other


def routing(num_rows: int, num_experts: int, per_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts per row, some outside the mixture, and their weights."""
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, num_experts + 2, generator=generator)
    return scores.topk(per_row).indices, torch.rand(num_rows, per_row, generator=generator)


def reference(weights: ExpertWeights, rows: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(rows.shape[0], weights.down.shape[1], dtype=torch.float64)
    for row, slot in itertools.product(range(len(rows)), range(experts.shape[1])):
        number = int(experts[row, slot])
        if number >= len(weights.up):
            continue
        up = weights.up[number].double() @ rows[row].double()
        up = up if weights.up_bias is None else up + weights.up_bias[number]
        result = weights.down[number].double() @ activate(up)
        result = result if weights.down_bias is None else result + weights.down_bias[number]
        out[row] += shares[row, slot] * result
    return out


def packers(kind: str) -> list[ExpertsPacker]:
    """Packers with different numbers of threads."""
    if kind == "torch":
        return [partial(TorchExperts, num_threads=count) for count in (1, 3)]
    return [partial(native_experts, NativeKernels(count)) for count in (1, 2, 3)]


SHAPES: Sequence[tuple[int, int, int, int]] = ((1, 8, 5, 1), (5, 33, 40, 2), (16, 96, 72, 4))


@pytest.mark.parametrize("kind", ["native", "torch"])
@for_each("is_gated", (True, False))
@for_each("num_experts, hidden, inner, per_row", SHAPES)
def test_products_are_those_of_each_expert(
    kind: str, num_experts: int, hidden: int, inner: int, per_row: int, is_gated: bool
) -> None:
    weights = mixture(num_experts, hidden, inner, is_gated=is_gated)
    packed = packers(kind)[-1](weights)
    for num_rows in (0, 1, 9):
        rows = random_rows(num_rows, hidden, seed=7)
        experts, shares = routing(num_rows, num_experts, per_row)
        expected = reference(weights, rows, experts, shares)
        torch.testing.assert_close(packed(rows, experts, shares, activate).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["native", "torch"])
@for_each("is_gated", (True, False))
def test_a_row_has_the_same_bits_for_any_rows_order_of_choices_and_threads(kind: str, is_gated: bool) -> None:
    weights = mixture(12, 64, 96, is_gated=is_gated)
    packs: list[PackedExperts] = [pack(weights) for pack in packers(kind)]
    rows, (experts, shares) = random_rows(64, 64, seed=7), routing(64, 12, 4)
    same = packs[0](rows, experts, shares, activate)
    cases = [(packed, count) for packed in packs for count in (1, 7, 33)]  # threads wait for each other: few cases
    if kind == "native":
        cases += [(packs[0], count) for count in range(1, 65)]
    for packed, count in cases:
        part = slice(64 - count, 64)
        assert torch.equal(packed(rows[part], experts[part], shares[part], activate), same[part]), count
        turned = packed(rows[part], experts[part].flip(1), shares[part].flip(1), activate)
        assert torch.equal(turned, same[part]), count


@for_each("function", (torch.sigmoid, torch.Tensor.sigmoid, torch.nn.functional.silu, torch.nn.functional.gelu))
def test_functions_give_an_element_the_same_bits_in_any_tensor(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    numbers = random_rows(1, 67)[0] * 4
    with InvariantFunctions():
        whole = function(numbers)
        for count in range(1, 67):
            assert torch.equal(function(numbers[:count]), whole[:count])


def test_a_router_multiplies_by_the_packed_weight_and_adds_its_bias() -> None:
    functions = InvariantFunctions()
    weight, bias, rows = random_rows(5, 32), random_rows(1, 5, seed=2)[0], random_rows(3, 32, seed=1)
    functions.take(weight, TorchWeight(weight, None, 1))
    with functions:
        one = torch.nn.functional.linear(rows[:1], weight.type(torch.float32), bias)
        three = torch.nn.functional.linear(rows, weight, bias)
    assert torch.equal(one, three[:1])
    torch.testing.assert_close(three, rows @ weight.T + bias)


def many_layers(seed: int, directory: Path) -> Path:
    config = MIXTURES["qwen3_moe"]()
    config.num_hidden_layers = 6
    return save_random(config, directory, seed=seed, dtype=torch.bfloat16)


@pytest.mark.parametrize("seed", [0, 3])
def test_near_ties_of_a_router_in_half_precision_are_no_error(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = many_layers(seed, tmp_path)
    with caplog.at_level(logging.INFO, logger="specdec.engine.model.proofs.judge"):
        ModelRunner.load(EngineSettings(model=str(directory), device="cpu", dtype="bfloat16", num_blocks=8))
    (record,) = [record for record in caplog.records if "routers chose" in record.message]
    assert 0 < vars(record)["share"] < 0.1


def test_a_router_that_chooses_other_experts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its input in a paged pass were wrong: the routes are those of another pass."""
    dense = Routes.recording

    def others(routes: Routes, keys: Sequence[Hashable]) -> AbstractContextManager[None]:
        is_text = len(keys) > 1 and isinstance(keys[0], tuple) and len(keys[0]) == 1
        return dense(routes, [*keys[1:], keys[0]] if is_text else keys)

    monkeypatch.setattr(Routes, "recording", others)
    directory = many_layers(0, tmp_path)
    with pytest.raises(ModelNotSupported, match="its routers choose other experts"):
        ModelRunner.load(EngineSettings(model=str(directory), device="cpu", dtype="bfloat16", num_blocks=8))


@torch.inference_mode()
def test_a_pass_follows_recorded_routes_and_counts_those_that_it_would_not_take() -> None:
    model = AutoModelForCausalLM.from_config(MIXTURES["qwen3_moe"]()).eval()
    ids, routes = torch.tensor([TOKENS[:12]]), Routes(model)
    keys = list(range(12))
    with routes.recording(keys):
        expected = model(ids).logits
    with routes.following(keys):
        assert torch.equal(model(ids).logits, expected)
    assert routes.share_changed == 0
    model.model.layers[1].mlp.gate.weight.neg_()  # chooses the least likely experts
    with routes.following(keys):
        followed = model(ids).logits
    assert routes.share_changed == 1 / 4  # every row, in one of two layers and of two passes
    torch.testing.assert_close(followed, expected)
    assert not torch.allclose(model(ids).logits, expected)
