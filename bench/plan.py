"""The measurements that the command line asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.pairs import Pair
from specdec.commands.measuring.requests import Sampling
from specdec.commands.up.plan import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """Options of one run of the bench."""

    pair: Pair
    cores: tuple[int, ...]
    """Cores of every system."""
    device: str = "cpu"
    placement: Placement = "apart"
    """Where the draft runs, except in parts that compare placements or delay the draft."""
    num_prompts: int = 4
    max_tokens: int = 96
    repeats: int = 2
    rounds: int = 1
    """Requests per place of a batch; more than 1 is a closed loop (`specdec.commands.measuring.closed_loop`)."""
    batches: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    verify_mode: str = "coupled"
    systems: tuple[str, ...] = ()
    """Names of systems or their beginnings; empty: all available systems."""
    sets: tuple[str, ...] = ()
    """Sets of drafters (`bench/systems/drafters.py`) that are measured beside plain decoding; empty: all."""
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
        """Title: the pair, and the verify mode, placement and loop where they are not the defaults."""
        place = "" if self.placement == "apart" else ", draft in the target"
        mode = "" if self.verify_mode == "coupled" else f", {self.verify_mode} mode"
        loop = "" if self.rounds == 1 else ", closed loop"
        return f"{self.pair.name}{mode}{place}{loop}"

    @property
    def sampling(self) -> Sampling:
        """Sampling options of all requests, without the temperature."""
        return Sampling(max_tokens=self.max_tokens, verify_mode=self.verify_mode)

    def facts(self) -> dict[str, Any]:
        """Options for the results, as JSON values."""
        kept = {name: getattr(self, name) for name in self.__slots__ if name != "pair"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
