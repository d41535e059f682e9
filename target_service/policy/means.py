"""Moving means, in which the policies keep times, rates and gains."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 1 / 20
"""Weight of one observation in a moving mean. Streaks of a few bad steps are common where the mean is good."""
SLOW_WEIGHT = 1 / 200
"""Weight of one observation that says little alone: yes or no, once per node, call or wait."""
PRIOR_WEIGHT = 4.0
"""Weight of an assumption, in observed nodes, calls or tokens."""
MOST_SURPRISE = 4.0
"""Factor over the mean at which an observed time is cut off: a stall of the machine says nothing of the code."""


@dataclass(slots=True)
class Mean:
    """An arithmetic mean of the first 20 observations, then a moving one."""

    value: float = 0.0
    num_seen: int = 0

    def observe(self, value: float) -> float:
        """Add an observation. Returns it, cut off at `MOST_SURPRISE` times the mean."""
        self.num_seen += 1
        believed = value if self.num_seen == 1 else min(value, MOST_SURPRISE * self.value)
        self.value += max(WEIGHT, 1 / self.num_seen) * (believed - self.value)
        return believed
