"""What to measure, as the command line says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.pairs import Pair
from specdec.commands.measuring.requests import Sampling
from specdec.commands.up.plan import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """One run of the bench. Every part takes from it what concerns it."""

    pair: Pair
    cores: tuple[int, ...]
    """All that any system may use; each gets all of them."""
    device: str = "cpu"
    placement: Placement = "apart"
    """Of the draft, in all parts but those that compare placements, or delay a draft."""
    num_prompts: int = 4
    max_tokens: int = 96
    repeats: int = 2
    rounds: int = 1
    """Requests per place: 1, all begin together; more, a closed loop (`specdec.commands.measuring.closed_loop`)."""
    batches: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    verify_mode: str = "coupled"
    systems: tuple[str, ...] = ()
    """Names or beginnings of names; none: all that are there."""
    sync_tokens: tuple[int, ...] = (4,)
    sync_hold_off_ms: float = 10.0
    peer_tokens: tuple[int, ...] = (3, 5, 8)
    rates: tuple[float, ...] = ()
    seconds: float = 20.0
    bursts: tuple[int, ...] = (8, 32)
    first_token_slo_ms: float = 500.0
    per_token_slo_ms: float = 50.0

    @property
    def label(self) -> str:
        """For titles: the pair, and how proposals are verified where that is not as usual."""
        place = "" if self.placement == "apart" else ", draft in the target"
        mode = "" if self.verify_mode == "coupled" else f", {self.verify_mode} mode"
        loop = "" if self.rounds == 1 else ", closed loop"
        return f"{self.pair.name}{mode}{place}{loop}"

    @property
    def sampling(self) -> Sampling:
        """What all requests have in common, but for the temperature."""
        return Sampling(max_tokens=self.max_tokens, verify_mode=self.verify_mode)

    def facts(self) -> dict[str, Any]:
        """For the results."""
        kept = {name: getattr(self, name) for name in self.__slots__ if name != "pair"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
