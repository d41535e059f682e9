"""How many rows a step may have, by what a row takes."""

from __future__ import annotations

import pytest

from specdec.engine.settings import EngineSettings
from specdec.replica.worker.build import most_rows


@pytest.mark.parametrize(
    ("row_s", "num_rows"), [(0.0, 512), (0.0039, 512), (0.01, 200), (0.02, 100), (0.5, 64)]
)  # fmt: skip
def test_a_step_takes_two_seconds_at_most_but_has_room_for_all_its_sessions(row_s: float, num_rows: int) -> None:
    settings = EngineSettings(model="any", max_batch_tokens=512, max_batch_seqs=64)
    assert most_rows(settings, row_s, "cpu") == num_rows


def test_what_is_set_is_never_exceeded() -> None:
    settings = EngineSettings(model="any", max_batch_tokens=16, max_batch_seqs=64)
    assert most_rows(settings, 0.5, "cuda") == 16


def test_a_gpus_step_has_room_for_four_times_the_rows_of_a_cpus() -> None:
    settings = EngineSettings(model="any")
    assert [most_rows(settings, 0.0, device_type) for device_type in ("cpu", "cuda")] == [512, 2048]
