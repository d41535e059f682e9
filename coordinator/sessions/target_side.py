"""A session at its target: which one holds it, under which epoch, and how that goes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from specdec.coordinator.sessions.hosts import TargetHost
from specdec.coordinator.sessions.prompt_logprobs import PromptProgress
from specdec.v1 import common_pb2 as pb

_MOST_DOWNS = 3
"""One that breaks once or twice while a long prompt is computed has not been tried enough."""


@dataclass(slots=True, eq=False)
class TargetSide:
    """A session at its target.

    Epochs count openings and only grow: what comes from an earlier opening is dropped.
    """

    host: TargetHost[Any] | None = None
    epoch: int = 0
    told_epoch: int = 0
    """The last one that a host was told of: what it still holds of the session is under this one."""
    credit_position: int = 0
    """The credit last given to it."""
    was_relayed: bool = False
    """A proposal was relayed since the session was opened here."""
    is_held: bool = False
    """It waits for its turn at the host, which does not hold it yet."""
    cleared_at: int | None = None
    """The position from which on it is no suspect any more, and up to which its host steps it alone; None: it is none.
    See `recovery.quarantine`."""
    is_doubtful: bool = False
    """A host stood still with it, and it has not been cleared since."""
    faulted_by: TargetHost[Any] | None = None
    """Who ended it for a fault of its own last, which may be the replica's."""
    failing_s: float | None = None
    """Since when, on the monotonic clock, it has been refusing the session; None: it does not."""
    num_failures: int = 0
    """In a row."""
    heard_s: float = 0.0
    """When it last got on, or could not for want of credit; on the monotonic clock."""
    queued_s: float | None = None
    """Since when the host has told that it waits there."""
    num_stalls: int = 0
    """Moves since it last got on, because it did not."""
    down_s: float | None = None
    """When a host's stream ended first since it last got on, on the monotonic clock."""
    num_downs: int = 0
    """How many did since then."""
    progress: tuple[int, int] | None = None
    """What the host told last: state, and tokens computed."""
    prompt: PromptProgress | None = None
    """Of the prompt's log-probabilities, where the client wants them of this choice."""
    retry: asyncio.TimerHandle | None = None

    def opened(self, host: TargetHost[Any]) -> None:
        """A new opening begins at a host."""
        self.host = host
        self.epoch += not self.is_held
        self.told_epoch = self.epoch
        self.was_relayed = False
        self.is_held = False
        self.heard_s = time.monotonic()
        self.queued_s = self.progress = None

    def told(self, progress: pb.SessionProgress, now_s: float) -> None:
        """The host tells what it does for the session. Waiting in its queue is no standstill."""
        is_queued = progress.state == pb.SessionProgress.STATE_QUEUED
        seen = (int(progress.state), progress.num_computed_tokens)
        if is_queued or seen != self.progress:
            self.heard_s = now_s
        self.progress = seen
        self.queued_s = (self.queued_s or now_s) if is_queued else None

    def held(self, host: TargetHost[Any]) -> None:
        """It is to be opened at a host later, in an epoch of its own; nothing of earlier openings counts any more."""
        self.host = host
        self.epoch += not self.is_held
        self.is_held = True
        self.cleared_at = None

    @property
    def waits_for_prompt_credit(self) -> bool:
        """It computes no more log-probabilities of the prompt before the client has taken some."""
        return self.prompt is not None and self.prompt.is_starved

    @property
    def is_open(self) -> bool:
        """Its host has been asked to open it, and has not refused."""
        return self.host is not None and not self.is_held and self.retry is None

    def supersede(self) -> None:
        """Drop whatever still comes from the current opening; the session stays, to be opened again."""
        self.epoch += 1
        self.is_held = False

    def recovered(self, now_s: float) -> None:
        """It decided something: what went wrong before is past."""
        self.failing_s = self.queued_s = self.down_s = None
        self.num_failures = self.num_stalls = self.num_downs = 0
        self.heard_s = now_s

    def went_down(self, now_s: float) -> None:
        """The stream of its host ended."""
        self.down_s = now_s if self.down_s is None else self.down_s
        self.num_downs += 1

    def has_gone_down_for(self, for_s: float, now_s: float) -> bool:
        """Whether streams have been ending under it for so long, again and again, and it got on under none."""
        return self.num_downs >= _MOST_DOWNS and self.down_s is not None and now_s - self.down_s >= for_s

    def pardon(self, for_s: float, now_s: float) -> None:
        """For so long nobody here listened: that is no time in which it did not get on."""
        self.heard_s = min(now_s, self.heard_s + for_s)
        if self.queued_s is not None:
            self.queued_s = min(now_s, self.queued_s + for_s)

    def cancel_retry(self) -> None:
        """Do not open the session again by itself."""
        if self.retry is not None:
            self.retry.cancel()
            self.retry = None
