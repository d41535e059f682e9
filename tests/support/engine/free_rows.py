"""A machine on which what is verified does not depend on the clock."""

from __future__ import annotations

from specdec.target_service.policy.step_time import StepTimeModel


class FreeRows(StepTimeModel):
    """A machine on which more rows cost nothing: everything offered is verified, whatever the clock says."""

    def predict(self, num_rows: int) -> float:
        return self.base_s

    def observe(self, num_rows: int, elapsed_s: float) -> None:
        self.row_s = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.row_s = 0.0
