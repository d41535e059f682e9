"""Predictions for GPUs: they follow from what the decoder launches, and the page says what the model says."""

from pathlib import Path

import pytest

from bench.pairs import TARGETS
from bench.predictions import (
    EAGLE_8B,
    beside,
    decoding_s,
    gpu_named,
    markdown,
    prefill_s,
    sizes_of_shape,
    speed_up,
)
from bench.roofline import GPUS, Gpu, fits, step_of, step_s
from specdec.plan.inputs.devices import Device

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpu-predictions.md"


def test_a_step_of_8b_reads_its_weights_once_whatever_few_rows_it_has() -> None:
    one, eight = step_of("8B", 1), step_of("8B", 8)
    assert 15.0e9 < one.num_bytes < 15.3e9
    assert eight.num_bytes < one.num_bytes * 1.01
    assert eight.num_flops == pytest.approx(8 * one.num_flops)
    assert 11 * 32 <= one.num_kernels <= 11 * 32 + 12


def test_no_step_is_faster_than_the_weights_can_be_read() -> None:
    for gpu in GPUS.values():
        assert step_s("8B", 1, gpu) > 15.0e9 / gpu.bandwidth


def test_a_gpu_without_limits_waits_for_starts_of_kernels_and_ramps_only() -> None:
    infinite, step = Gpu(Device("none", 1e30, 1e30, 1e30, 1, 0.0)), step_of("1B", 1)
    assert step_s("1B", 1, infinite) == pytest.approx(step.num_kernels * 1.2e-6 + step.num_products * 3e-6)


def test_a_layer_has_four_products() -> None:
    assert step_of("8B", 1).num_products == 4 * 32 + 1


def test_another_gpu_for_the_draft_is_better_than_turns_and_a_head_better_than_a_model() -> None:
    gpu = GPUS["H100 SXM"]
    for acceptance in (0.6, 0.7, 0.8):
        in_turns, _ = speed_up("1B", "8B", 1, gpu, acceptance)
        assert 1.0 < in_turns < speed_up("1B", "8B", 1, gpu, acceptance, is_apart=True)[0]
        assert in_turns < speed_up(EAGLE_8B, "8B", 1, gpu, acceptance)[0]


def test_many_streams_and_long_prompts_are_predicted_to_be_faster_elsewhere() -> None:
    gpu = GPUS["H100 SXM"]
    ratios = [decoding_s(number, gpu) / decoding_s(number, gpu, is_other=True) for number in (1, 64, 256)]
    assert 1.0 < ratios[0] < 1.1 < ratios[2]
    assert prefill_s(32768, gpu) > 2 * prefill_s(32768, gpu, is_other=True)


def test_nothing_accepted_is_no_speed_up_and_more_accepted_is_more() -> None:
    gpu = GPUS["H200"]
    assert speed_up("1B", "8B", 1, gpu, 0.0) == (1.0, 0)
    ratios = [speed_up("1B", "8B", 1, gpu, acceptance)[0] for acceptance in (0.5, 0.7, 0.9)]
    assert ratios == sorted(ratios)


def test_weights_must_fit_the_memory_of_each_rank() -> None:
    assert not fits(("70B",), GPUS["H100 SXM"])
    assert fits(("1B", "70B"), GPUS["H100 SXM"], 4)


def test_the_page_is_what_the_model_predicts() -> None:
    assert PAGE.read_text() == markdown(), "python -m bench.predictions --markdown docs/gpu-predictions.md"


def test_predictions_are_of_the_gpu_that_was_there() -> None:
    assert gpu_named("NVIDIA H100 80GB HBM3") is GPUS["H100 SXM"]
    assert gpu_named("NVIDIA H200") is GPUS["H200"]
    assert gpu_named("NVIDIA L40S") is gpu_named("NVIDIA H100 PCIe") is None
    one_row_s = step_s(sizes_of_shape(TARGETS["gpu-8b"]), 1, GPUS["H200"])
    assert one_row_s > 14.8 * 2**30 / 2 / GPUS["H200"].bandwidth


def test_what_a_slot_has_measured_confirms_or_refutes_what_is_predicted() -> None:
    gpu, name = "NVIDIA H200", "8b: {} rows at 1024, ms"
    predicted = {rows: step_s("8B", rows, GPUS["H200"]) * 1e3 for rows in (1, 8)}
    row = {"batch": 1, "temperature": 1.0, "speedup": {"median": 1.01}, "acceptance_by_depth": [0.9, 0.5]}
    told = beside(
        {
            "machine": {"gpu": ["NVIDIA H200, 143771"]},
            "steps": {"gpu": gpu, "found": {name.format(1): predicted[1] * 1.1, name.format(8): 2 * predicted[8]}},
            "speedup": {"gpu": gpu, "found": None, "earlier": {"gpu": gpu, "found": {"report": {"decode": [row]}}}},
            "large": {"status": "failed", "gpu": "another", "found": {"report": {"decode": [row]}}},
        }
    )
    assert [line.rpartition(": ")[2] for line in told] == ["confirmed", "REFUTED", "REFUTED"]
    assert told[0].startswith(name.format(1))
    assert told[2].startswith("speedup: speed-up at temperature 1, 90% accepted: 1.01 (predicted: ")
