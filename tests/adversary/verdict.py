"""What went wrong in a run, and during which event."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

NO_EVENT = "no fault"
ENDINGS = ("unequal", "error", "hung")
"""Failures that are a request's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that may not happen."""

    what: str
    """unequal, error, stuck, hung, died, not whole, orphan, memory."""
    detail: str
    event: int | None
    label: str
    """The event's faults."""
    at_s: float
    """Since the run began."""


@dataclass(slots=True)
class Verdict:
    """Collects failures; says each as it comes."""

    say: Callable[[str], None]
    failures: list[Failure] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    """Answers that a client was told to ask for again, before anything was streamed, by reason."""
    num_equal: int = 0
    num_cut_off: int = 0
    num_over_http: int = 0
    """Equal answers of gateways."""
    num_asked_again: int = 0
    """Requests whose gateway ended, and that were asked again at another."""
    event: int | None = None
    """The event that is under way; failures are put down to it."""
    label: str = NO_EVENT
    began_s: float = field(default_factory=time.monotonic)

    def fail(self, what: str, detail: str) -> None:
        """Something went wrong now."""
        failure = Failure(
            what=what, detail=detail, event=self.event, label=self.label, at_s=time.monotonic() - self.began_s
        )
        self.failures.append(failure)
        self.say(f"FAILED {what}: {detail} (event {self.event}: {self.label})")

    @property
    def num_done(self) -> int:
        """Requests that have ended: answers that were equal, cut off ones included, and those that failed."""
        return self.num_equal + self.num_cut_off + sum(failure.what in ENDINGS for failure in self.failures)
