"""The state of one choice while it decodes, and of the request it belongs to.

What it has at its target (`target_side.py`) and at its drafts (`drafting.py`) are its sides; who holds it there is seen
through `hosts.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
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
"""49.7 days: what the field holds. A request that far from its deadline never gets there."""


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
    num_open_bytes: int = 0
    """The largest that an entry which opens a choice can become: what a target must take in a message."""
    num_prompt_logprobs_bytes: int = 0
    """The largest that the log-probabilities of the prompt can be, where the client wants them."""
    with_steps: bool = False
    """The client is told of each step."""
    is_constrained: bool = False
    """Its output has to be something; only targets that know constraints, all in the same way, can see to that."""
    priority: int = 0
    """Orders its tenant's requests in the queue. Engines are not told: there it would stop what runs of others."""
    cache_salt: bytes = b""
    is_salted: bool = False
    """The client has chosen a part of it."""
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
    rejection_method: pb.RejectionSampleMethod.ValueType = pb.REJECTION_SAMPLE_METHOD_UNSPECIFIED
    time_per_token_us: int = 0
    """Wanted; 0: not told."""
    drafters: tuple[str, ...] = ()
    """Those alone may propose; none: all."""
    prediction: Sequence[int] = ()
    """What its output is expected to be."""
    may_have_draft: bool = True
    """Whether a draft may be opened for it, if it speculates."""
    fork_from: str = ""
    """Used at the first opening only: later ones find the prompt in the prefix cache."""
    num_written: int = 0
    """Position up to which the client has taken tokens."""
    tally: SpeculationTally = field(default_factory=SpeculationTally)
    finish: Finish | None = None
    numerics_ids: list[str] = field(default_factory=list)
    """Of the targets that computed its output, in the order of their first use."""
    target: TargetSide = field(default_factory=TargetSide)
    drafting: Drafting = field(default_factory=Drafting)

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

    def close(self, reason: str) -> None:
        """End it at all replicas that have it, and open it nowhere again."""
        self.drafting.cancel_retry()
        self.target.cancel_retry()
        for side in self.drafting.sides[:]:
            side.host.close(self, reason)
        if self.target.host is not None:
            self.target.host.close(self, reason)

    def computed_with(self, numerics_id: str) -> None:
        """From here on its output is computed with these numerics."""
        if self.position == self.num_prompt_tokens:
            self.numerics_ids = [numerics_id]
            return
        self.numerics_ids = self.numerics_ids or [self.request.model.numerics_id]
        if numerics_id not in self.numerics_ids:
            self.numerics_ids.append(numerics_id)

    def open_body(self, traceparent: str, *, for_target: bool = False) -> pb.OpenSession:
        """The OpenSession of either side, with all committed tokens."""
        body = pb.OpenSession(
            token_ids=self.token_ids,
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


SessionHost: TypeAlias = hosts.SessionHost[Session]
TargetHost: TypeAlias = hosts.TargetHost[Session]
DraftHost: TypeAlias = hosts.DraftHost[Session]
