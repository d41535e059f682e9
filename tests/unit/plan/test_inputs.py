"""Inputs of a plan, good and bad: each error is one line that says what would be possible."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import roofline
from specdec.commands.tune.measured import StepTimes
from specdec.plan.inputs.devices import DEVICES, PlanImpossible, device_named, devices_of, measured_machine
from specdec.plan.inputs.models import ModelSizes, model_of, read_model
from specdec.plan.inputs.step_times import (
    GAP_S,
    PLAIN_GAP_S,
    MeasuredSteps,
    Roofline,
    acceptance_of,
    conditional,
    read_measured,
)
from specdec.plan.inputs.traffic import Lengths, Rate
from tests.support.for_each import for_each

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(PlanImpossible) as caught:
        call()
    message = str(caught.value)
    assert message and "\n" not in message
    return message


# --- devices and models


@for_each("name", ("H100", "h100", "H100 SXM", "NVIDIA H100 80GB", "nvidia-h100"))
def test_a_device_is_known_by_its_usual_names(name: str) -> None:
    assert device_named(name) is DEVICES["H100"]


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    message = refusal(lambda: devices_of("H10"))
    assert "H10'" in message and "did you mean H100" in message and "L4" in message
    assert "known are" in refusal(lambda: devices_of("abacus"))
    assert "no device" in refusal(lambda: devices_of(" , "))
    for price in ("free", "nan", "-1", "0", "inf", "1e308"):
        assert "dollars per hour" in refusal(lambda price=price: devices_of(f"L4={price}"))
    assert "several" in refusal(lambda: measured_machine("a,b"))


def test_prices_may_be_given() -> None:
    assert [(d.name, d.price) for d in devices_of("L4=1.5, H100")] == [("L4", 1.5), ("H100", DEVICES["H100"].price)]


def test_sizes_of_a_config_are_those_of_its_model() -> None:
    sizes = model_of(LLAMA_8B, "8B")
    assert sizes.weight_bytes == pytest.approx(2 * 8.03e9, rel=0.01)
    assert sizes.kv_bytes == 128 * 1024
    assert model_of({"text_config": LLAMA_8B}, "multimodal").layers == 32


def test_a_step_of_experts_reads_those_that_its_rows_use() -> None:
    config = {**LLAMA_8B, "num_local_experts": 8, "num_experts_per_tok": 2}
    mixtral = model_of(config, "8x7B")
    assert mixtral.weight_bytes == pytest.approx(2 * 46.7e9, rel=0.02)
    assert mixtral.flops_per_row == pytest.approx(2 * 12.6e9, rel=0.05)
    assert mixtral.read_bytes(1) < 0.31 * mixtral.read_bytes(1000)


@for_each("value", (None, 0, -4, "many", 1.5, True, 10**12))
def test_a_config_without_a_size_is_refused_by_the_fields_name(value: Any) -> None:
    assert "num_hidden_layers" in refusal(lambda: model_of({**LLAMA_8B, "num_hidden_layers": value}, "odd"))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refusal(lambda: read_model(tmp_path))
    (tmp_path / "config.json").write_text("[")
    assert "no JSON" in refusal(lambda: read_model(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "no object" in refusal(lambda: read_model(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert read_model(tmp_path).hidden == 4096


@for_each(
    "fields",
    (
        {"is_encoder_decoder": True},
        {"architectures": ["BertForMaskedLM"]},
        {"architectures": ["T5EncoderModel"], "model_type": "t5"},
    ),
)
def test_a_model_that_is_no_decoder_is_refused(fields: dict[str, Any]) -> None:
    assert "decoder" in refusal(lambda: model_of({**LLAMA_8B, **fields}, "odd"))
    assert model_of({**LLAMA_8B, "architectures": ["LlamaForCausalLM"]}, "usual").layers == 32


# --- step times


def test_the_roofline_agrees_with_the_one_that_counts_kernels() -> None:
    """`bench.roofline` counts kernels and bytes in the decoder itself."""
    for name, ranks in (("0.5B", 1), ("8B", 1), ("70B", 4)):
        counted = roofline.MODELS[name]
        sizes = ModelSizes(
            name=name,
            max_len=8192,
            **{field: getattr(counted, field) for field in ("hidden", "intermediate", "layers", "heads", "kv_heads")},
            head_dim=counted.head_dim,
            vocab=counted.vocab,
        )
        for rows in (1, 8):
            step_s = Roofline(sizes, device_named("H100"), ranks, roofline.CONTEXT).seconds(1, rows)
            counted_s = roofline.step_s(name, rows, roofline.GPUS["H100 SXM"], ranks) + (
                PLAIN_GAP_S if rows == 1 else GAP_S
            )
            assert step_s == pytest.approx(counted_s, rel=0.1)


def test_a_measurement_gives_its_step_times_and_acceptance(tmp_path: Path) -> None:
    file = tmp_path / "specdec-tune.json"
    tune = {
        "target_step_ms": {"1": {"1": 10.0, "4": 13.0}, "8": {"1": 20.0, "4": 44.0}},
        "draft_step_ms": {"1": {"1": 1.0}},
        "outside_ms": {"1": 2.0},
        "survival": {"0.0": {"coupled": [0.8, 0.4, 0.4], "rejection": [0.1]}},
    }
    file.write_text(json.dumps({"tune": tune}))
    found = read_measured(file, 0.0)
    assert found.target.seconds(1, 1) == pytest.approx(0.012)
    assert found.target.seconds(1, 3) == pytest.approx(0.014)
    assert found.target.seconds(8, 32) == pytest.approx(0.046)
    assert found.draft.seconds(1, 1) == pytest.approx(0.001)
    assert found.acceptance == pytest.approx([0.8, 0.5, 1.0])
    served = {"outside_verifying_ms": {"1": 3.0, "8": 5.0}, "outside_drafting_ms": {"1": 0.25}}
    file.write_text(json.dumps({"tune": {**tune, **served}}))
    serving = read_measured(file, 0.0)
    assert serving.target.seconds(1, 1) == pytest.approx(0.012)  # plain steps: as before
    assert serving.target.seconds(1, 3) == pytest.approx(0.015)
    assert serving.target.seconds(8, 32) == pytest.approx(0.049)
    assert serving.draft.seconds(1, 1) == pytest.approx(0.00125)
    file.write_text(json.dumps({"tune": tune}))
    assert "only at 0" in refusal(lambda: read_measured(file, 0.7))
    for part in tune:
        file.write_text(json.dumps({"tune": {key: value for key, value in tune.items() if key != part}}))
        assert part in refusal(lambda: read_measured(file, 0.0))
    for broken in (
        {"draft_step_ms": {"1": {"1": 0.0}}},
        {"outside_ms": {"1": -1.0}},
        {"outside_ms": {"1": 1e400}},
        {"outside_verifying_ms": {"1": -1.0}},
        {"outside_drafting_ms": {"1": "nan"}},
        {"survival": {"0.0": {"coupled": [0.8, None]}}},
        {"survival": {"0.0": {"coupled": [1.5]}}},
        {"target_prompt_ms": {"32": 0.0}},
        {"target_prompt_ms": []},
    ):
        file.write_text(json.dumps({"tune": {**tune, **broken}}))
        assert "specdec tune --report" in refusal(lambda: read_measured(file, 0.0))


def test_a_prompts_rows_have_their_own_measured_time() -> None:
    times = StepTimes({1: {1: 10.0, 4: 40.0}, 8: {1: 20.0, 4: 100.0}})
    steps = MeasuredSteps(times, {1: 2.0, 8: 6.0}, prompt_ms={64: 42.0, 128: 74.0})
    assert steps.prompt_seconds(64, 0) == pytest.approx(0.044)
    assert steps.prompt_seconds(96, 0) == pytest.approx(0.060)
    assert steps.prompt_seconds(64, 8) == pytest.approx(0.032), "the weights are read once for both"
    assert steps.seconds(4, 4) - times.of(4, 1) / 1e3 == pytest.approx((2 + 4 * 3 / 7) / 1e3)
    assert MeasuredSteps(times).prompt_seconds(64, 0) == pytest.approx(0.64), "as verified rows, if it was not measured"


def test_acceptance_is_given_by_depth() -> None:
    assert acceptance_of("0.8, 0.7") == [0.8, 0.7]
    for text in ("", "1.2", "-0.1", "high", "nan"):
        assert "0.8,0.75,0.7" in refusal(lambda text=text: acceptance_of(text))
    assert conditional([0.5, 0.0, 0.0]) == [0.5, 0.0]
    assert conditional([]) == [0.0]


# --- traffic


@for_each("text", ("512", "128-1024", "512~0.8"))
def test_lengths_have_the_mean_that_is_asked_for(text: str) -> None:
    lengths = Lengths.parse(text, "--prompt-tokens")
    drawn = lengths.draw(np.random.default_rng(1), 20_000)
    assert drawn.min() >= 1
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.03)


@for_each("text", ("", "0", "-5", "10-5", "5-", "many", "10~-1", "10~99", "1e9", "nan", "inf", "1-2-3", "3~4~5"))
def test_lengths_that_are_none_are_refused_with_the_forms_that_are(text: str) -> None:
    assert "128-1024" in refusal(lambda: Lengths.parse(text, "--prompt-tokens"))


@for_each("burstiness", (0.2, 1.0, 4.0))
def test_a_rate_has_its_mean_and_its_burstiness(burstiness: float) -> None:
    rate = Rate(per_s=50.0, prompts=Lengths(10), outputs=Lengths(10), burstiness=burstiness)
    times_s = np.array([arrival.at_s for arrival in rate.arrivals(400.0, 3)])
    gaps = np.diff(times_s)
    assert len(times_s) == pytest.approx(20_000, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)
    assert len(rate.scaled(0.5).arrivals(400.0, 3)) == pytest.approx(10_000, rel=0.07)


def test_a_day_rises_and_falls() -> None:
    day = Rate(per_s=0.2, prompts=Lengths(10), outputs=Lengths(10), swing=0.9)
    hours = np.histogram([a.at_s / 3600 for a in day.arrivals(86_400.0, 1)], bins=24, range=(0, 24))[0]
    assert hours[11:13].mean() > 5 * hours[[0, 23]].mean()
    assert sum(hours) == pytest.approx(0.2 * 86_400, rel=0.05)


def test_a_model_is_named_by_its_folder_or_its_files_own_name(tmp_path: Path) -> None:
    for name in ("config.json", "llama-405b.json"):
        (tmp_path / name).write_text(json.dumps(LLAMA_8B))
    assert read_model(tmp_path).name == read_model(tmp_path / "config.json").name == tmp_path.name
    assert read_model(tmp_path / "llama-405b.json").name == "llama-405b"
