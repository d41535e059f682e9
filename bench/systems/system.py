"""What every system that is measured can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.prompts import Prompt
from specdec.commands.measuring.requests import Sampling


class LeftOut(Exception):
    """A system is not there, or did not start; says why, for the report."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a system made of a group of prompts."""

    tokens_per_s: float
    """Of one prompt alone: from its first tokens to its last, those not counted. Of several: from the start."""
    token_ids: Sequence[Sequence[int]]


class System(Protocol):
    """Something that decodes."""

    @property
    def name(self) -> str:
        """In every table; begins with whose it is."""

    @property
    def setting(self) -> str:
        """What it was told, such as how many tokens to draft; "" where nothing matters."""

    def can_run(self, batch: int, temperature: float) -> bool:
        """Whether it decodes so many at once at this temperature."""

    async def tune(self, prompts: Sequence[Prompt], max_tokens: int) -> Mapping[str, float]:
        """Warm up, and choose the fastest setting, greedy and alone; returns tokens/s by setting, where it has any."""

    async def run(self, prompts: Sequence[Prompt], sampling: Sampling) -> Outcome:
        """Decode prompts at once; exactly `max_tokens` tokens each, whatever they say."""


@dataclass(slots=True)
class Clock:
    """When the tokens of one request came."""

    first_s: float | None = None
    last_s: float = 0.0
    num_first: int = 0
    num_tokens: int = 0

    def add(self, num_tokens: int, now_s: float) -> None:
        """So many came together."""
        if num_tokens == 0:
            return
        if self.first_s is None:
            self.first_s, self.num_first = now_s, num_tokens
        self.last_s = now_s
        self.num_tokens += num_tokens

    @property
    def tokens_per_s(self) -> float:
        """The first ones not counted; 0 where nothing came after them."""
        elapsed_s = self.last_s - (self.first_s or 0.0)
        return (self.num_tokens - self.num_first) / elapsed_s if elapsed_s > 0 else 0.0
