"""A session at its target: the replica, the epoch, and the progress."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from specdec.coordinator.sessions.hosts import TargetHost
from specdec.coordinator.sessions.prompt_logprobs import PromptProgress
from specdec.v1 import common_pb2 as pb

_MOST_DOWNS = 3
"""Ends of a session's streams without progress before it fails: fewer may be chance during a long prompt."""


@dataclass(slots=True, eq=False)
class TargetSide:
    """A session at its target.

    Epochs count openings; results of earlier openings are dropped.
    """

    host: TargetHost[Any] | None = None
    epoch: int = 0
    told_epoch: int = 0
    """The last epoch sent to a host, under which it may still hold the session."""
    credit_position: int = 0
    """The last position sent as credit."""
    was_relayed: bool = False
    """A proposal was relayed since the session was opened here."""
    is_held: bool = False
    """It waits to be opened at the host."""
    cleared_at: int | None = None
    """Position at which a suspect is cleared and up to which its host steps it alone; None: no suspect. See
    `recovery.quarantine`."""
    is_doubtful: bool = False
    """A host stalled with it, and it has not been cleared since."""
    faulted_by: TargetHost[Any] | None = None
    """The last host that could not handle it, by its own or the session's fault."""
    failing_s: float | None = None
    """Monotonic time since which hosts have refused it; None: they have not."""
    num_failures: int = 0
    """Refusals in a row."""
    heard_s: float = 0.0
    """Monotonic time of its last progress, or of its last wait for credit."""
    queued_s: float | None = None
    """Monotonic time since which the host has reported it as queued; None: it is not."""
    num_stalls: int = 0
    """Moves because of stalls since its last progress."""
    down_s: float | None = None
    """Monotonic time of the first end of a host's stream since its last progress."""
    num_downs: int = 0
    """Ends of hosts' streams since its last progress."""
    progress: tuple[int, int] | None = None
    """The host's last report: state, and tokens computed."""
    prompt: PromptProgress | None = None
    """Progress of the prompt's log-probabilities, if the client wants them of this choice."""
    retry: asyncio.TimerHandle | None = None

    def opened(self, host: TargetHost[Any]) -> None:
        """Begin a new opening at a host."""
        self.host = host
        self.epoch += not self.is_held
        self.told_epoch = self.epoch
        self.was_relayed = False
        self.is_held = False
        self.heard_s = time.monotonic()
        self.queued_s = self.progress = None

    def told(self, progress: pb.SessionProgress, now_s: float) -> None:
        """The host reported progress. Waiting in its queue is no stall."""
        is_queued = progress.state == pb.SessionProgress.STATE_QUEUED
        seen = (int(progress.state), progress.num_computed_tokens)
        if is_queued or seen != self.progress:
            self.heard_s = now_s
        self.progress = seen
        self.queued_s = (self.queued_s or now_s) if is_queued else None

    def held(self, host: TargetHost[Any]) -> None:
        """Plan an opening at a host for later, with a new epoch; results of earlier openings are dropped."""
        self.host = host
        self.epoch += not self.is_held
        self.is_held = True
        self.cleared_at = None

    @property
    def waits_for_prompt_credit(self) -> bool:
        """The target waits for the client to read log-probabilities of the prompt."""
        return self.prompt is not None and self.prompt.is_starved

    @property
    def is_open(self) -> bool:
        """Its host was asked to open it, and has not refused."""
        return self.host is not None and not self.is_held and self.retry is None

    def supersede(self) -> None:
        """Drop later results of the current opening; the session is to be opened again."""
        self.epoch += 1
        self.is_held = False

    def recovered(self, now_s: float) -> None:
        """The session made progress: forget earlier failures."""
        self.failing_s = self.queued_s = self.down_s = None
        self.num_failures = self.num_stalls = self.num_downs = 0
        self.heard_s = now_s

    def went_down(self, now_s: float) -> None:
        """The stream of its host ended."""
        self.down_s = now_s if self.down_s is None else self.down_s
        self.num_downs += 1

    def has_gone_down_for(self, for_s: float, now_s: float) -> bool:
        """Whether its hosts' streams have kept ending for `for_s` seconds, without progress."""
        return self.num_downs >= _MOST_DOWNS and self.down_s is not None and now_s - self.down_s >= for_s

    def pardon(self, for_s: float, now_s: float) -> None:
        """Do not count `for_s` seconds in which this process stood still."""
        self.heard_s = min(now_s, self.heard_s + for_s)
        if self.queued_s is not None:
            self.queued_s = min(now_s, self.queued_s + for_s)

    def cancel_retry(self) -> None:
        """Cancel the planned opening."""
        if self.retry is not None:
            self.retry.cancel()
            self.retry = None
