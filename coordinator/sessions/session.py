"""The state of one choice while it decodes, and of its request.

Its state at the target is in `target_side.py`, that at its drafts in `drafting.py`; `hosts.py` has the replicas'
protocols.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from specdec.coordinator.sessions import hosts
from specdec.coordinator.sessions.client_stream import ClientStream
from specdec.coordinator.sessions.drafting import Drafting
from specdec.coordinator.sessions.request_trace import RequestResult, RequestTrace
from specdec.coordinator.sessions.tally import SpeculationTally, total
from specdec.coordinator.sessions.target_side import TargetSide
from specdec.coordinator.text.choice_output import ChoiceOutput, Finish
from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.store.interface import RequestKey
from specdec.v1 import common_pb2 as pb

_MOST_DEADLINE_MS = 2**32 - 1
"""Milliseconds, 49.7 days: the largest value of the field on the wire."""


@dataclass(slots=True, eq=False)
class Request:
    """A client's request while it runs.

    Invariant: `num_unfinished` is the number of sessions without a `finish`; at zero the stream is closed.
    """

    key: RequestKey
    uid: str
    stream: ClientStream
    arrived_s: float
    """Monotonic time."""
    model: pb.ModelIdentity
    """The planned model, which decides its tokens: see `compatibility.may_serve`."""
    num_losses: int = 0
    """Its targets that were lost from outside."""
    num_deaths: int = 0
    """Replicas that died in its steps, or failed it, since it was last cleared."""
    last_death_s: float = 0.0
    """Monotonic time of the last of these deaths."""
    num_context_tokens: int = 0
    """Tokens of prompt and longest output of a choice: the context that a target must have."""
    num_open_bytes: int = 0
    """Bytes of the largest entry that opens a choice: the message limit that a target must have."""
    num_prompt_logprobs_bytes: int = 0
    """Bytes, at most, of the prompt's log-probabilities; 0 if the client wants none."""
    with_steps: bool = False
    """The client gets each step's record."""
    is_constrained: bool = False
    """Its output is constrained; only targets with the same constraint engine may serve it."""
    priority: int = 0
    """Orders its tenant's requests in the queue. Engines ignore it: there it would preempt other tenants."""
    cache_salt: bytes = b""
    is_salted: bool = False
    """The client has chosen a part of the salt."""
    deadline_s: float | None = None
    """Monotonic time."""
    trace: RequestTrace = field(default_factory=RequestTrace)

    sessions: Sequence[Session] = ()
    """One per choice, after admission; see `start`."""
    prompt_digests: Sequence[bytes] = ()
    """Digests of the prompt's blocks, once a target was picked by them: all choices have the same."""
    num_unfinished: int = 0
    num_cached_tokens: int = 0
    has_output: bool = False
    waiting: asyncio.Task[Any] | None = None
    """Set while it waits for a place or a target; see `end_wait`."""
    is_aborted: bool = False

    def start(self, sessions: Sequence[Session]) -> None:
        """The request is admitted, with these choices."""
        self.sessions = sessions
        self.num_unfinished = len(sessions)

    def end_wait(self) -> None:
        """The request has ended: cancel its wait for a place or a target."""
        if self.waiting is not None:
            self.waiting.cancel()

    def deadline_ms(self) -> int | None:
        """Milliseconds to the deadline, at most what the field holds; None without a deadline."""
        if self.deadline_s is None:
            return None
        return min(_MOST_DEADLINE_MS, max(1, round((self.deadline_s - time.monotonic()) * 1000)))

    def result(self) -> RequestResult | None:
        """The result so far, for its trace; None before it started."""
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
    token_ids: array[int]
    """Prompt and committed output; an array, as garbage collections walk lists of up to a million ids."""
    num_prompt_tokens: int
    sampling: pb.TokenSampling
    verify_mode: pb.VerifyMode.ValueType
    speculate: bool
    output: ChoiceOutput
    detokenizers: DetokenizerFactory
    max_draft_tokens: int | None = None
    rejection_method: pb.RejectionSampleMethod.ValueType = pb.REJECTION_SAMPLE_METHOD_UNSPECIFIED
    time_per_token_us: int = 0
    """Wanted time; 0 if the client names none."""
    drafters: tuple[str, ...] = ()
    """Sources that may propose; empty: all."""
    prediction: Sequence[int] = ()
    """Token ids that the client expects as output."""
    may_have_draft: bool = True
    """Whether a draft may be opened for it, if it speculates."""
    fork_from: str = ""
    """Id of the session whose prompt it shares; used at the first opening only, later ones use the prefix cache."""
    num_written: int = 0
    """Position up to which the client has read tokens."""
    tally: SpeculationTally = field(default_factory=SpeculationTally)
    finish: Finish | None = None
    numerics_ids: list[str] = field(default_factory=list)
    """Numerics ids of the targets that computed its output, in the order of first use."""
    target: TargetSide = field(default_factory=TargetSide)
    drafting: Drafting = field(default_factory=Drafting)
    on_ended: Callable[[], None] = lambda: None
    """Called at its end, once it was opened."""

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of each log event about the session."""
        return {"request_id": self.request.key.request_id, "session": self.session_id, **self.request.trace.log_fields}

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens committed so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finish_reason(self) -> pb.FinishReason.ValueType:
        """Why it ended; an unfinished session counts as aborted."""
        return pb.FINISH_REASON_ABORT if self.finish is None else self.finish.reason

    def close(self, reason: str) -> None:
        """Close it at all its replicas, and cancel planned openings."""
        self.drafting.cancel_retry()
        self.target.cancel_retry()
        for side in self.drafting.sides[:]:
            side.host.close_session(self, reason)
        if self.target.host is not None:
            self.target.host.close_session(self, reason)

    def computed_with(self, numerics_id: str) -> None:
        """Its next output is computed with these numerics."""
        if self.position == self.num_prompt_tokens:
            self.numerics_ids = [numerics_id]
            return
        self.numerics_ids = self.numerics_ids or [self.request.model.numerics_id]
        if numerics_id not in self.numerics_ids:
            self.numerics_ids.append(numerics_id)

    def open_body(self, traceparent: str, *, for_target: bool = False) -> pb.OpenSession:
        """The OpenSession for a draft or target, with all committed tokens."""
        body = pb.OpenSession(
            token_ids=self.token_ids.tolist(),  # protobuf takes 3 times as long for an array
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            verify_mode=self.verify_mode,
            speculate=self.speculate,
            max_draft_tokens=self.max_draft_tokens,
            time_per_token_us=self.time_per_token_us,
            deadline_ms=self.request.deadline_ms(),
            cache_salt=self.request.cache_salt,
            credit_position=self.target.credit_position,
            traceparent=traceparent,
        )
        if self.position == self.num_prompt_tokens:
            body.fork_from = self.fork_from
        if for_target:
            body.rejection_sample_method = self.rejection_method
            body.drafters.extend(self.drafters)
            body.prediction_token_ids.extend(self.prediction)
        return body


SessionHost: TypeAlias = hosts.SessionReplica[Session]
TargetHost: TypeAlias = hosts.TargetHost[Session]
DraftHost: TypeAlias = hosts.DraftHost[Session]
