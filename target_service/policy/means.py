"""Moving means, which are all that the policies keep of times, rates and gains."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 1 / 20
"""Weight of one new observation in a moving mean. Streaks of a few bad steps are common where the mean is good."""
SLOW_WEIGHT = 1 / 200
"""Weight of one new observation where single ones say little: yes or no, once per node, call or wait."""
PRIOR_WEIGHT = 4.0
"""Nodes, calls or tokens for which an assumption counts beside what was seen since."""
MOST_SURPRISE = 4.0
"""Factor over the mean at which an observed time is cut off: a machine that stood still says nothing of the code."""


@dataclass(slots=True)
class Mean:
    """A plain mean of the first observations, then a moving one."""

    value: float = 0.0
    num_seen: int = 0

    def observe(self, value: float) -> float:
        """One more observation. Returns what is believed of it: at most `MOST_SURPRISE` times the mean."""
        self.num_seen += 1
        believed = value if self.num_seen == 1 else min(value, MOST_SURPRISE * self.value)
        self.value += max(WEIGHT, 1 / self.num_seen) * (believed - self.value)
        return believed
