"""Schedules by wall clock: a run ends on time, and at a learning rate of zero, on any machine."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

logger = logging.getLogger("models.training")


@dataclass
class TrainingPhase:
    """One stretch of training with a budget of ``seconds``, its progress and its log."""

    name: str
    seconds: float
    started: float = field(default_factory=time.monotonic)
    steps: int = 0
    tokens: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    _sums: dict[str, float] = field(default_factory=dict)
    _steps_in_sums: int = 0
    _last_report: float = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self.started

    @property
    def fraction(self) -> float:
        """Share of the budget used, at most 1."""
        return min(1.0, self.elapsed / self.seconds)

    def record(self, tokens: int, report_every_s: float = 30.0, **values: float) -> None:
        """Count a step; every ``report_every_s`` log the means since the last report."""
        self.steps += 1
        self.tokens += tokens
        self._steps_in_sums += 1
        for key, value in values.items():
            self._sums[key] = self._sums.get(key, 0.0) + value
        if self.elapsed - self._last_report < report_every_s:
            return
        means = {key: round(total / self._steps_in_sums, 4) for key, total in self._sums.items()}
        row = {"elapsed_s": round(self.elapsed, 1), "steps": self.steps, "tokens": self.tokens, **means}
        self.history.append(row)
        logger.info(
            "%s %5.1f %% step %d, %.2f M tokens, %.0f tokens/s, %s",
            self.name,
            100 * self.fraction,
            self.steps,
            self.tokens / 1e6,
            self.tokens / self.elapsed,
            " ".join(f"{key} {value:.3f}" for key, value in means.items()),
        )
        self._sums.clear()
        self._steps_in_sums = 0
        self._last_report = self.elapsed


def warmup_stable_decay(fraction: float, warmup: float, decay_from: float) -> float:
    """Learning-rate factor at ``fraction`` of the budget: linear up, constant, linear to zero."""
    if fraction < warmup:
        return max(0.02, fraction / warmup)
    if fraction < decay_from or decay_from >= 1.0:
        return 1.0
    return (1.0 - fraction) / (1.0 - decay_from)
