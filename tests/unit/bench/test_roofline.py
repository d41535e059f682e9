"""Predictions for GPUs: they follow from what the decoder launches, and the page says what the model says."""

from pathlib import Path

import pytest

from bench.roofline import GPUS, Gpu, fits, markdown, speed_up, step_of, step_s

PAGE = Path(__file__).resolve().parents[3] / "bench" / "results" / "roofline.md"


def test_a_step_of_8b_reads_its_weights_once_whatever_few_rows_it_has() -> None:
    one, eight = step_of("8B", 1), step_of("8B", 8)
    assert 15.0e9 < one.num_bytes < 15.3e9
    assert eight.num_bytes < one.num_bytes * 1.01
    assert eight.num_flops == pytest.approx(8 * one.num_flops)
    assert 10 * 32 <= one.num_kernels <= 10 * 32 + 12


def test_no_step_is_faster_than_the_weights_can_be_read() -> None:
    for gpu in GPUS.values():
        assert step_s("8B", 1, gpu) > 15.0e9 / gpu.bandwidth


def test_a_gpu_without_limits_waits_for_starts_of_kernels_only() -> None:
    infinite = Gpu(1e30, 1e30, 1e30)
    assert step_s("1B", 1, infinite) == pytest.approx(step_of("1B", 1).num_kernels * 1.2e-6)


def test_nothing_accepted_is_no_speed_up_and_more_accepted_is_more() -> None:
    gpu = GPUS["H200"]
    assert speed_up("1B", "8B", 1, gpu, 0.0) == (1.0, 0)
    ratios = [speed_up("1B", "8B", 1, gpu, acceptance)[0] for acceptance in (0.5, 0.7, 0.9)]
    assert ratios == sorted(ratios)


def test_weights_must_fit_the_memory_of_each_rank() -> None:
    assert not fits(("70B",), GPUS["H100 SXM"])
    assert fits(("1B", "70B"), GPUS["H100 SXM"], 4)


def test_the_page_is_what_the_model_predicts() -> None:
    assert PAGE.read_text() == markdown(), "python -m bench.roofline --markdown bench/results/roofline.md"
