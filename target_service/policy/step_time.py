"""A model of the target's step time over its rows, fitted online."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.target_service.policy.means import MOST_SURPRISE, WEIGHT


@dataclass(slots=True)
class StepTimeModel:
    """Step time as a straight line over rows, by exponentially weighted least squares.

    Predicts ``base_s + row_s * num_rows``, where rows are those that the step computes, padding included. A prior keeps
    the first predictions sane. It weighs as much as one step and is scaled to the observed steps, so that steps of one
    size leave a slope: else one stalled step could make rows look so expensive that no larger step is ever tried again.
    Cost of an update: constant.
    """

    base_s: float = 0.010
    """Seconds of a step without rows; assumed until steps are observed, as is `row_s`."""
    row_s: float = 0.0005
    """Seconds per row."""
    edges: tuple[int, ...] = ()
    """Row counts that steps are padded to, rising; empty: steps are not padded."""
    _prior: tuple[float, float] = field(init=False)
    _sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0, 0.0])
    """Weighted sums of 1, x, y, xx and xy, for x rows and y seconds."""

    def __post_init__(self) -> None:
        self._prior = (self.base_s, self.row_s)
        self._add_prior(1.0, scale=1.0)

    def observe(self, num_rows: int, elapsed_s: float) -> None:
        """Learn that a step of `num_rows` rows took `elapsed_s`."""
        num_rows = self.padded(num_rows)
        elapsed_s = min(elapsed_s, MOST_SURPRISE * self.predict(num_rows))
        self._sums = [value * (1 - WEIGHT) for value in self._sums]
        self._add(num_rows, elapsed_s)
        weight, x, y, _, _ = self._sums
        base_s, row_s = self._prior
        self._add_prior(WEIGHT, scale=y / (base_s * weight + row_s * x))
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        if spread > 1e-6 * weight * weight:
            self.row_s = max((weight * xy - x * y) / spread, 1e-7)
        self.base_s = max((y - self.row_s * x) / weight, 1e-6)

    def predict(self, num_rows: int) -> float:
        """Expected seconds of a step of `num_rows` rows before padding."""
        return self.base_s + self.row_s * self.padded(num_rows)

    def padded(self, num_rows: int) -> int:
        """Rows that a step of `num_rows` computes, padding included."""
        return next((edge for edge in self.edges if edge >= num_rows), num_rows)

    def _add_prior(self, weight: float, scale: float) -> None:
        base_s, row_s = self._prior
        for rows in (1, 8):
            self._add(rows, scale * (base_s + row_s * rows), weight)

    def _add(self, x: float, y: float, weight: float = 1.0) -> None:
        for index, value in enumerate((1.0, x, y, x * x, x * y)):
            self._sums[index] += weight * value
