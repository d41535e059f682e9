"""Limits of an endpoint in tokens and money, and pauses after failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from specdec.config.drafter_options import OpenAiApiOptions
from specdec.wire.backoff import Backoff

_MILLION = 1_000_000
_SLOW_IN_A_ROW = 4
"""Streams in a row, never ahead of the target, that count as a failure."""
_BACKOFF = Backoff(1.0, 300.0)


@dataclass(slots=True)
class Spent:
    """Tokens and money spent so far."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    cost: float = 0.0
    """Money in the currency of the prices."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Greatest spending of one call."""

    num_prompt_tokens: int
    max_tokens: int


class Ledger:
    """The spending of all sessions at one endpoint. Thread-safe.

    A call first reserves its greatest spending, so that concurrent calls cannot exceed a limit. The endpoint's token
    count is clamped between the tokens that arrived and the tokens asked for.
    """

    def __init__(self, options: OpenAiApiOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._reserved = Spent()
        self._failures = self._slow = self._running = 0
        self._not_before_s = 0.0
        self.spent = Spent()

    @property
    def may_ask(self) -> bool:
        """Whether pauses and running calls allow a call now."""
        with self._lock:
            return self._running < self._options.max_streams and self._clock() >= self._not_before_s

    def reserve(self, num_prompt_tokens: int, max_tokens: int) -> Reservation | None:
        """Reserve a call; None if it is not allowed now or exceeds a limit. Call from one thread only."""
        if not self.may_ask:
            return None
        with self._lock:
            options = self._options
            spent, reserved = self.spent, self._reserved
            num_tokens = num_prompt_tokens + max_tokens
            for each in (spent, reserved):
                num_tokens += each.num_prompt_tokens + each.num_completion_tokens
            if options.max_total_tokens is not None and num_tokens > options.max_total_tokens:
                return None
            cost = self._cost(num_prompt_tokens, max_tokens)
            if options.max_cost is not None and spent.cost + reserved.cost + cost > options.max_cost:
                return None
            self._add(reserved, num_prompt_tokens, max_tokens, 1)
            self._running += 1
            return Reservation(num_prompt_tokens, max_tokens)

    def settle(self, reservation: Reservation, num_arrived: int, num_counted: int | None) -> None:
        """End a call, of which `num_arrived` tokens arrived; `num_counted` is the endpoint's own count."""
        with self._lock:
            self._running -= 1
            self._add(self._reserved, reservation.num_prompt_tokens, reservation.max_tokens, -1)
            counted = num_arrived if num_counted is None else max(num_arrived, num_counted)
            self._add(self.spent, reservation.num_prompt_tokens, min(counted, reservation.max_tokens), 1)

    def failed(self) -> float:
        """Pause after a failed call, longer after each failure in a row. Returns the seconds."""
        with self._lock:
            self._failures += 1
            wait_s = _BACKOFF.wait_s(self._failures)
            self._not_before_s = self._clock() + wait_s
            return wait_s

    def was_slow(self) -> float | None:
        """A stream was never ahead of the target. Several in a row count as a failure; returns its pause then."""
        with self._lock:
            self._slow += 1
            if self._slow < _SLOW_IN_A_ROW:
                return None
            self._slow = 0
        return self.failed()

    def was_useful(self) -> None:
        """The target committed a token that a stream had predicted."""
        with self._lock:
            self._failures = self._slow = 0

    def _cost(self, num_prompt_tokens: int, num_completion_tokens: int) -> float:
        options = self._options
        return (
            num_prompt_tokens * options.price_per_million_prompt_tokens
            + num_completion_tokens * options.price_per_million_completion_tokens
        ) / _MILLION

    def _add(self, to: Spent, num_prompt_tokens: int, num_completion_tokens: int, sign: int) -> None:
        to.num_prompt_tokens += sign * num_prompt_tokens
        to.num_completion_tokens += sign * num_completion_tokens
        to.cost += sign * self._cost(num_prompt_tokens, num_completion_tokens)
