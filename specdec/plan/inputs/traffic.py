"""Requests over time: a rate with distributions of lengths, or a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import Generator

from specdec.plan.inputs.devices import PlanImpossible

_MOST_TOKENS = 1_000_000
_DRAWS = 20_000
_PEAK_S = 900.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    prefix: tuple[int, ...] = ()
    """Ids of the prompt's blocks, equal for equal beginnings; empty: it shares nothing."""
    num_begin: int = 2
    """Blocks of the prefix by which gateways know the chat: up to the end of its first question. Of a recording the
    first two, since many chats share a system prompt."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of numbers of tokens; all are whole and at least 1."""

    mean: float
    variation: float = 0.0
    """Standard deviation over the mean, of a log-normal distribution; 0: all have the mean."""
    low: float | None = None
    """Lowest value of a uniform distribution, whose highest one is as far above the mean; None: it is not uniform."""

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """`512`: all equal; `128-1024`: uniform; `512~0.8`: log-normal, with its variation. Raises PlanImpossible."""
        try:
            if "~" in text:
                mean, variation = map(float, text.split("~"))
                found = cls(mean, variation)
            elif "-" in text.strip("-"):
                low, high = map(float, text.split("-"))
                found = cls((low + high) / 2, low=low)
                if high < low:
                    raise ValueError
            else:
                found = cls(float(text))
        except ValueError:
            found = cls(math.nan)
        least = found.mean if found.low is None else found.low
        if not (1 <= least <= found.mean <= _MOST_TOKENS and 0 <= found.variation <= 10):
            words = "must be 512 (all equal), 128-1024 (uniform) or 512~0.8 (log-normal with its variation)"
            raise PlanImpossible(f"{flag} {text[:40]!r} {words}, from 1 to {_MOST_TOKENS} tokens")
        return found

    def draw(self, rng: Generator, num: int) -> np.ndarray:
        """Some lengths."""
        if self.low is not None:
            values = rng.uniform(self.low, 2 * self.mean - self.low, num)
        elif self.variation:
            sigma = math.sqrt(math.log1p(self.variation**2))
            values = rng.lognormal(math.log(self.mean) - sigma * sigma / 2, sigma, num)
        else:
            return np.full(num, max(1, round(self.mean)))
        return np.maximum(1, np.rint(values)).astype(int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Requests that arrive independently of each other."""

    per_s: float
    prompts: Lengths
    outputs: Lengths
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps, as in `vllm bench serve`: 1 is Poisson, below 1 comes in bursts."""
    tenants: Sequence[tuple[str, float]] = (("", 1.0),)
    """Tenants, and the share of requests of each."""
    swing: float = 0.0
    """Part of the rate by which it rises and falls over `swing_s`, as a sine."""
    swing_s: float = 86_400.0

    def arrivals(self, seconds: float, seed: int) -> list[Arrival]:
        """The requests within `seconds`, in the order of their times."""
        rng = np.random.default_rng(seed)
        most = self.per_s * (1 + self.swing)
        times_s = self._times_s(rng, most, seconds)
        if self.swing:
            wanted = self.per_s * (1 + self.swing * np.sin(2 * np.pi * times_s / self.swing_s - np.pi / 2))
            times_s = times_s[rng.random(len(times_s)) < wanted / most]
        num = len(times_s)
        prompts, outputs = self.prompts.draw(rng, num), self.outputs.draw(rng, num)
        names, shares = zip(*self.tenants, strict=True)
        chosen = rng.choice(len(names), num, p=np.array(shares) / sum(shares))
        return [
            Arrival(float(at), int(prompt), int(output), names[tenant])
            for at, prompt, output, tenant in zip(times_s, prompts, outputs, chosen, strict=True)
        ]

    def _times_s(self, rng: Generator, per_s: float, seconds: float) -> np.ndarray:
        parts, at_s = [], 0.0
        while at_s < seconds:
            gaps = rng.gamma(self.burstiness, 1 / (per_s * self.burstiness), max(64, int(per_s * seconds / 4)))
            times_s = at_s + np.cumsum(gaps)
            parts.append(times_s)
            at_s = float(times_s[-1])
        every = np.concatenate(parts)
        return every[every < seconds]

    def prompt_quantile(self, share: float) -> float:
        """Tokens of a prompt that a share of the prompts does not exceed."""
        return float(np.quantile(self.prompts.draw(np.random.default_rng(0), _DRAWS), share))

    @property
    def peak(self) -> Rate:
        """The same requests at the highest rate of a day."""
        return replace(self, per_s=self.per_s * (1 + self.swing), swing=0.0)

    def scaled(self, factor: float) -> Rate:
        """The same requests, `factor` times as often."""
        return replace(self, per_s=self.per_s * factor)

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of an output."""
        return self.prompts.mean, self.outputs.mean


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests; times from 0."""

    requests: Sequence[Arrival]
    num_left_out: int = 0
    """Requests of the recording that are not here, as they have no lengths: they were refused or failed."""
    _factor: float = field(default=1.0)
    _least_s: float = field(default=0.0)
    """Seconds that it lasts at least, after its last request."""

    def arrivals(self, seconds: float, seed: int) -> list[Arrival]:
        """The trace's requests within `seconds`, again from its begin where it is shorter; `seed` shifts the begin."""
        own = list(self._looped(seconds, seed))
        return own

    def _looped(self, seconds: float, seed: int) -> Iterator[Arrival]:
        length_s = self.length_s / self._factor
        start = int(np.random.default_rng(seed).integers(len(self.requests))) if seed else 0
        first_s, at_s, index = self.requests[start].at_s / self._factor, 0.0, start
        turn = 0.0
        while True:
            request = self.requests[index]
            at_s = request.at_s / self._factor - first_s + turn
            if at_s >= seconds:
                return
            yield replace(request, at_s=at_s)
            index += 1
            if index == len(self.requests):
                index, turn = 0, turn + length_s

    @property
    def length_s(self) -> float:
        """Seconds of the trace, at least to a mean gap after its last request."""
        last_s = self.requests[-1].at_s
        return max(self._least_s, last_s + max(last_s / max(1, len(self.requests) - 1), 1e-3))

    @property
    def per_s(self) -> float:
        """Mean requests per second."""
        return self._factor * len(self.requests) / self.length_s

    def prompt_quantile(self, share: float) -> float:
        """Tokens of a prompt that a share of the prompts does not exceed."""
        return float(np.quantile([request.prompt_tokens for request in self.requests], share))

    @property
    def peak(self) -> Trace:
        """The quarter of an hour with the most tokens; a shorter recording itself. A trial may else see none of it."""
        times_s = np.array([request.at_s for request in self.requests]) / self._factor
        if times_s[-1] <= _PEAK_S:
            return self
        tokens = np.cumsum([0, *(request.prompt_tokens + request.output_tokens for request in self.requests)])
        ends = np.searchsorted(times_s, times_s + _PEAK_S)
        first = int(np.argmax(tokens[ends] - tokens[:-1]))
        busiest, first_s = self.requests[first : ends[first]], self.requests[first].at_s
        requests = [replace(request, at_s=request.at_s - first_s) for request in busiest]
        return replace(self, requests=requests, _least_s=_PEAK_S * self._factor)

    def scaled(self, factor: float) -> Trace:
        """The same requests, `factor` times as often."""
        return replace(self, _factor=self._factor * factor)

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of an output."""
        prompts, outputs = (sum(getattr(r, name) for r in self.requests) for name in ("prompt_tokens", "output_tokens"))
        return prompts / len(self.requests), outputs / len(self.requests)


Traffic = Rate | Trace
