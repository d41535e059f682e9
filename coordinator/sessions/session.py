"""The state of one choice while it decodes, of the request it belongs to, and of its two sides.

A side is what a session has at its target or at its draft: which replica holds it, under which epoch, and how that
goes. Who holds a session is seen from here through `TargetHost` and `DraftHost`; the links are such hosts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.sessions.client_stream import ClientStream
from coordinator.sessions.request_trace import RequestResult, RequestTrace
from coordinator.sessions.tally import SpeculationTally, total
from coordinator.text.choice_output import ChoiceOutput, Finish
from coordinator.text.detokenizer import DetokenizerFactory
from specdec.store.interface import RequestKey
from specdec.v1 import common_pb2 as pb

_MOST_DEADLINE_MS = 2**32 - 1
"""49.7 days: what the field holds. A request that far from its deadline never gets there."""


class SessionHost(Protocol):
    """A replica that holds a session, as the session sees it. No call here waits."""

    @property
    def role(self) -> str:
        """`target` or `draft`."""

    @property
    def address(self) -> str:
        """host:port."""

    @property
    def identity(self) -> pb.ModelIdentity | None:
        """What it serves, as it said last."""

    @property
    def is_up(self) -> bool:
        """What is sent now reaches it."""

    @property
    def is_ready(self) -> bool:
        """New sessions may be opened without a second thought."""

    def open(self, session: Session) -> None:
        """Open a session, or open it again, under a new epoch and with all its tokens."""

    def close(self, session: Session, reason: str) -> None:
        """End a session."""


class TargetHost(SessionHost, Protocol):
    """The target that holds a session."""

    @property
    def tells_progress(self) -> bool:
        """It tells what sessions without a verdict are doing; older targets do not."""

    def relay(self, session: Session, proposal: bytes) -> None:
        """Pass on an encoded Proposal."""

    def give_credit(self, session: Session) -> None:
        """Tell how far the target may run, and what has arrived."""

    def release(self, session: Session) -> None:
        """Give a session up to another target; what this one still holds of it is freed."""

    def hold(self, session: Session) -> None:
        """Take a session that is to be opened here later."""


class DraftHost(SessionHost, Protocol):
    """The draft that holds a session."""

    def commit(self, session: Session, start_position: int, token_ids: Sequence[int]) -> None:
        """Tell which tokens are final."""


@dataclass(slots=True, eq=False)
class TargetSide:
    """A session at its target.

    Epochs count openings and only grow: what comes from an earlier opening is dropped. The same holds for a draft.
    """

    host: TargetHost | None = None
    epoch: int = 0
    credit_position: int = 0
    """The credit last given to it."""
    was_relayed: bool = False
    """A proposal was relayed since the session was opened here."""
    is_held: bool = False
    """It waits for its turn at the host, which does not hold it yet."""
    cleared_at: int | None = None
    """The position from which on it is no suspect any more; None: it is none. See `recovery.quarantine`."""
    faulted_by: TargetHost | None = None
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
    progress: tuple[int, int] | None = None
    """What the host told last: state, and tokens computed."""
    retry: asyncio.TimerHandle | None = None

    def opened(self, host: TargetHost) -> None:
        """A new opening begins at a host."""
        self.host = host
        self.epoch += not self.is_held
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

    def held(self, host: TargetHost) -> None:
        """It is to be opened at a host later, in an epoch of its own; nothing of earlier openings counts any more."""
        self.host = host
        self.epoch += not self.is_held
        self.is_held = True
        self.cleared_at = None

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
        self.failing_s = self.queued_s = None
        self.num_failures = self.num_stalls = 0
        self.heard_s = now_s

    def cancel_retry(self) -> None:
        """Do not open the session again by itself."""
        if self.retry is not None:
            self.retry.cancel()
            self.retry = None


@dataclass(slots=True, eq=False)
class DraftSide:
    """A session at its draft. Without a host it goes on, more slowly."""

    host: DraftHost | None = None
    epoch: int = 0
    num_failures: int = 0
    """Since a draft last came up."""
    unanswered_s: float | None = None
    """When it was told of the first commit that no proposal has followed yet."""
    num_stalls: int = 0
    """Moves since a proposal came, because none did."""
    num_barren: int = 0
    """Steps in a row that verified a proposal of the host and accepted nothing."""
    has_accepted: bool = False
    """Something of what the host proposed was accepted."""
    num_proposals: int = 0
    """Since the last commit."""
    num_proposed_bytes: int = 0
    """In these."""
    retry: asyncio.TimerHandle | None = None

    def opened(self, host: DraftHost) -> None:
        """A new opening begins at a host."""
        self.host = host
        self.epoch += 1
        self.unanswered_s = None
        self.num_barren, self.has_accepted = 0, False
        self.committed()

    def committed(self) -> None:
        """It is told of a commit: proposals are due."""
        self.num_proposals = self.num_proposed_bytes = 0

    def cancel_retry(self) -> None:
        """Do not open the session again by itself."""
        if self.retry is not None:
            self.retry.cancel()
            self.retry = None


@dataclass(slots=True, eq=False)
class Request:
    """A client's request while it runs.

    Invariant: `num_unfinished` is the number of sessions without a `finish`; at zero the stream is closed.
    """

    key: RequestKey
    uid: str
    stream: ClientStream
    arrived_s: float
    """On the monotonic clock."""
    model: pb.ModelIdentity
    """What decides its tokens, as planned: see `compatibility.may_serve`."""
    num_losses: int = 0
    """Targets that were lost while it was open there, for reasons that hardly lie with it."""
    num_deaths: int = 0
    """Replicas that died, or failed it, since it was last seen to get on."""
    last_death_s: float = 0.0
    """When a replica died under it last, on the monotonic clock."""
    num_context_tokens: int = 0
    """The longest that prompt and output of a choice can become, in tokens: what a target must have room for."""
    priority: int = 0
    """Orders its tenant's requests in the queue. Engines are not told: there it would stop what runs of others."""
    cache_salt: bytes = b""
    deadline_s: float | None = None
    """On the monotonic clock."""
    trace: RequestTrace = field(default_factory=RequestTrace)

    sessions: Sequence[Session] = ()
    """One per choice, from when it has its place; see `start`."""
    num_unfinished: int = 0
    num_cached_tokens: int = 0
    has_output: bool = False
    waiting: asyncio.Task[Any] | None = None
    """Set while it waits for a place or a target; see `end_wait`."""
    is_aborted: bool = False

    def start(self, sessions: Sequence[Session]) -> None:
        """It has its place: these are its choices."""
        self.sessions = sessions
        self.num_unfinished = len(sessions)

    def end_wait(self) -> None:
        """It has been ended (aborted, taken over, drained): nobody need wait for a place or a target any more."""
        if self.waiting is not None:
            self.waiting.cancel()

    def deadline_ms(self) -> int | None:
        """What is left of the deadline, or as much of it as the wire can tell; None: there is none."""
        if self.deadline_s is None:
            return None
        return min(_MOST_DEADLINE_MS, max(1, round((self.deadline_s - time.monotonic()) * 1000)))

    def result(self) -> RequestResult | None:
        """What has come of it so far, for its trace; None before it started."""
        if not self.sessions:
            return None
        first = self.sessions[0]
        return RequestResult(
            num_prompt_tokens=first.num_prompt_tokens,
            num_output_tokens=sum(session.num_output_tokens for session in self.sessions),
            num_cached_tokens=self.num_cached_tokens,
            finish_reasons=[session.finish_reason for session in self.sessions],
            seed=first.sampling.seed,
            verify_mode=first.verify_mode,
            speculate=first.speculate,
            stats=total(session.tally for session in self.sessions),
        )


@dataclass(slots=True, eq=False)
class Session:
    """One choice: its tokens, its text, and where it is open."""

    session_id: str
    choice: int
    request: Request
    token_ids: list[int]
    """Prompt and committed output."""
    num_prompt_tokens: int
    sampling: pb.TokenSampling
    verify_mode: pb.VerifyMode.ValueType
    speculate: bool
    output: ChoiceOutput
    detokenizers: DetokenizerFactory
    max_draft_tokens: int | None = None
    num_prompt_logprobs: int | None = None
    fork_from: str = ""
    """Used at the first opening only: later ones find the prompt in the prefix cache."""
    num_written: int = 0
    """Position up to which the client has taken tokens."""
    tally: SpeculationTally = field(default_factory=SpeculationTally)
    finish: Finish | None = None
    numerics_ids: list[str] = field(default_factory=list)
    """Of the targets that computed its output, in the order of their first use."""
    target: TargetSide = field(default_factory=TargetSide)
    draft: DraftSide = field(default_factory=DraftSide)

    @property
    def log_fields(self) -> dict[str, str]:
        """What log lines about it carry."""
        return {"request_id": self.request.key.request_id, "session": self.session_id, **self.request.trace.log_fields}

    @property
    def position(self) -> int:
        """Where the next token goes."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Committed so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finish_reason(self) -> pb.FinishReason.ValueType:
        """Why it ended; one that nobody ended counts as aborted."""
        return pb.FINISH_REASON_ABORT if self.finish is None else self.finish.reason

    def computed_with(self, numerics_id: str) -> None:
        """From here on its output is computed with these numerics."""
        if self.position == self.num_prompt_tokens:
            self.numerics_ids = [numerics_id]
            return
        self.numerics_ids = self.numerics_ids or [self.request.model.numerics_id]
        if numerics_id not in self.numerics_ids:
            self.numerics_ids.append(numerics_id)

    def open_body(self, traceparent: str) -> pb.OpenSession:
        """The OpenSession of either side, with all committed tokens."""
        body = pb.OpenSession(
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            verify_mode=self.verify_mode,
            speculate=self.speculate,
            max_draft_tokens=self.max_draft_tokens,
            deadline_ms=self.request.deadline_ms(),
            cache_salt=self.request.cache_salt,
            credit_position=self.target.credit_position,
            traceparent=traceparent,
        )
        if self.position == self.num_prompt_tokens:
            body.fork_from = self.fork_from
            if self.num_prompt_logprobs is not None:
                body.num_prompt_logprobs = self.num_prompt_logprobs
        return body
