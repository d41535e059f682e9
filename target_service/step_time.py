"""A model of the target's step time, fitted online: what one more row costs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepTimeModel:
    """Step time as a straight line over rows, by exponentially weighted least squares.

    Predicts ``base_s + row_s * num_rows``. The prior keeps the first predictions sane and fades as steps are seen.
    Cost of an update: constant.
    """

    base_s: float = 0.010
    row_s: float = 0.0005
    decay: float = 0.98
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # weight, x, y, xx, xy

    def __post_init__(self) -> None:
        for rows in (1, 8):
            self._add(rows, self.base_s + self.row_s * rows, weight=0.5)

    def observe(self, num_rows: int, elapsed_s: float) -> None:
        """A step of `num_rows` rows took `elapsed_s`."""
        self._sums = [value * self.decay for value in self._sums]
        self._add(num_rows, elapsed_s)
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        if spread > 1e-6 * weight * weight:
            self.row_s = max((weight * xy - x * y) / spread, 1e-7)
        self.base_s = max((y - self.row_s * x) / weight, 1e-6)

    def predict(self, num_rows: int) -> float:
        """Expected time of a step, in seconds."""
        return self.base_s + self.row_s * num_rows

    def _add(self, x: float, y: float, weight: float = 1.0) -> None:
        for index, value in enumerate((1.0, x, y, x * x, x * y)):
            self._sums[index] += weight * value
