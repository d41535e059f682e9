"""The straight line of step time over rows, fitted online."""

from __future__ import annotations

import random

import pytest

from specdec.target_service.policy.step_time import StepTimeModel


def test_it_finds_the_line_that_steps_lie_on() -> None:
    model = StepTimeModel()
    for i in range(400):
        rows = 1 + i % 9
        model.observe(rows, 0.004 + 0.0003 * rows)
    assert model.base_s == pytest.approx(0.004, rel=0.05)
    assert model.row_s == pytest.approx(0.0003, rel=0.05)
    assert model.predict(20) == pytest.approx(0.010, rel=0.05)


def test_padded_steps_lie_on_a_staircase() -> None:
    model = StepTimeModel(edges=(1, 2, 4, 8, 16))
    for i in range(400):
        rows = 1 + i % 9
        model.observe(rows, 0.004 + 0.0003 * model.padded(rows))
    assert model.base_s == pytest.approx(0.004, rel=0.05)
    assert model.predict(5) == model.predict(8) == pytest.approx(0.0064, rel=0.05)
    assert model.predict(9) == pytest.approx(0.0088, rel=0.05)
    assert (model.padded(16), model.padded(17)) == (16, 17)


def test_noise_averages_out() -> None:
    model, rng = StepTimeModel(), random.Random(0)
    for i in range(2000):
        rows = 1 + i % 9
        model.observe(rows, (0.004 + 0.0003 * rows) * rng.uniform(0.8, 1.2))
    assert model.predict(5) == pytest.approx(0.0055, rel=0.1)


def test_steps_of_one_size_move_the_base_and_keep_a_sane_slope() -> None:
    model = StepTimeModel()
    for _ in range(500):
        model.observe(1, 0.020)
    assert model.predict(1) == pytest.approx(0.020, rel=0.05)
    assert model.row_s > 0


def test_it_follows_a_machine_that_becomes_slower() -> None:
    model = StepTimeModel()
    for scale in (1.0, 3.0):
        for i in range(400):
            rows = 1 + i % 9
            model.observe(rows, scale * (0.004 + 0.0003 * rows))
    assert model.predict(5) == pytest.approx(3 * 0.0055, rel=0.05)


def test_a_falling_line_is_never_believed() -> None:
    model = StepTimeModel()
    for i in range(300):
        rows = 1 + i % 9
        model.observe(rows, 0.02 - 0.001 * rows)
    assert model.row_s > 0
    assert model.predict(64) >= model.predict(1) > 0


def test_a_step_that_stalls_does_not_make_rows_look_dear_for_ever() -> None:
    model = StepTimeModel()
    for i in range(400):
        rows = 1 + i % 9
        model.observe(rows, 0.004 + 0.0003 * rows)
    model.observe(9, 5.0)
    assert model.predict(9) < 2 * 0.0067
    for _ in range(300):  # nobody dares to run more than one row now
        model.observe(1, 0.0043)
    assert model.predict(1) == pytest.approx(0.0043, rel=0.05)
    assert model.predict(9) < 2 * 0.0067
