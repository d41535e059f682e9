"""Interface of a measured system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.prompts import Prompt
from specdec.commands.measuring.requests import Sampling


class LeftOut(Exception):
    """A system is not available or has failed; the message is the reason in the report."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outputs of a system for a group of prompts, and its speed."""

    tokens_per_s: float
    """Tokens per second: of one prompt, from its first tokens, which do not count; of several, from the start."""
    token_ids: Sequence[Sequence[int]]


class System(Protocol):
    """A system that decodes prompts."""

    @property
    def name(self) -> str:
        """Name in tables, which begins with the project's."""

    @property
    def setting(self) -> str:
        """Setting in tables, such as the number of draft tokens; "" where there is none."""

    def can_run(self, batch: int, temperature: float) -> bool:
        """Whether it decodes `batch` prompts at once at this temperature."""

    async def tune(self, prompts: Sequence[Prompt], max_tokens: int) -> Mapping[str, float]:
        """Warm up, and choose the setting that is fastest for greedy single prompts; returns tokens/s by setting."""

    async def run(self, prompts: Sequence[Prompt], sampling: Sampling) -> Outcome:
        """Decode prompts at once: exactly `max_tokens` tokens each, past an end of sequence."""


@dataclass(slots=True)
class Clock:
    """Arrival times of one request's tokens."""

    first_s: float | None = None
    last_s: float = 0.0
    num_first: int = 0
    num_tokens: int = 0

    def add(self, num_tokens: int, now_s: float) -> None:
        """Record `num_tokens` tokens that arrived together."""
        if num_tokens == 0:
            return
        if self.first_s is None:
            self.first_s, self.num_first = now_s, num_tokens
        self.last_s = now_s
        self.num_tokens += num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first ones; 0 where none came after them."""
        elapsed_s = self.last_s - (self.first_s or 0.0)
        return (self.num_tokens - self.num_first) / elapsed_s if elapsed_s > 0 else 0.0
