"""A session as the target holds it."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.constraints.grammar.apart import ApartFollower
from specdec.engine.sampling.token_history import TokenHistory
from specdec.engine.sequence import Sequence as EngineSequence
from specdec.replica.worker.sessions import EngineSession
from specdec.target_service.logprobs import PromptLogprobs
from specdec.target_service.policy.acceptance import OwnRecord
from specdec.target_service.policy.gate_state import GateState
from specdec.target_service.policy.hold_off import HoldOff, MissRecord
from specdec.target_service.policy.marginal_gains import DrafterCall
from specdec.target_service.policy.urgency import urgency
from specdec.target_service.tree.proposed import ReadProposal
from specdec.target_service.tree.speculation_tree import SpeculationTree
from specdec.target_service.tree.walk import EndOfChoice
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import RejectionMethod, SamplingParams, VerifyMode


class SessionState(enum.Enum):
    """State of a session: FORKING, PREFILL, then in turns DECIDED and one of HIT, MISS, HELD; at last ENDED."""

    FORKING = enum.auto()
    """The session waits for its constraint, or for a prompt that another session computes, and has no sequence."""
    PREFILL = enum.auto()
    """The first token is not decided yet."""
    DECIDED = enum.auto()
    """A verdict was sent; the next step is not planned."""
    HIT = enum.auto()
    """The next step is planned, and had a usable proposal when it could first be formed."""
    MISS = enum.auto()
    """The next step is planned without a proposal and without a hold-off."""
    HELD = enum.auto()
    """The next step has no proposal and is held off for one (`TargetSession.hold_off`)."""
    ENDED = enum.auto()
    """The sequence is freed."""


@dataclass(slots=True)
class SessionTimes:
    """Times of time.monotonic, in seconds."""

    opened_at_s: float
    first_step_at_s: float | None = None
    first_verdict_at_s: float | None = None
    num_first_tokens: int = 0
    """Number of committed tokens before the first verdict."""
    last_verdict_at_s: float | None = None
    told_at_s: float = 0.0
    """Time of the last progress message to the owner."""


@dataclass(slots=True, eq=False, kw_only=True)
class TargetSession(EngineSession):
    """One choice while it decodes. Only `begin`, `decided`, `plan` and `finish` change its state."""

    body: pb.OpenSession
    """Message that opened the session; its tokens are the session's until there is a sequence."""
    params: SamplingParams
    """Sampling parameters."""
    mode: VerifyMode
    """Mode of verification."""
    rejection_method: RejectionMethod
    """Method of verification in rejection mode."""
    end: EndOfChoice
    """Conditions that end the choice."""
    history: TokenHistory
    """Counts of the committed tokens, for penalties."""
    tree: SpeculationTree
    """Proposals below the last committed token."""
    max_nodes: int
    """Most nodes verified in one step; 0 without speculation."""
    has_draft: bool
    """Whether a draft service has the session or has sent a proposal: steps may wait for proposals."""
    credit_position: int
    """Number of committed tokens at which the session pauses."""
    times: SessionTimes
    arrived: bytes | ReadProposal | None = None
    """Latest proposal not yet in the tree, which includes all earlier ones; parsed if there was time for that."""
    num_answered: int = 0
    """Number of tokens when the draft last reported that it sends no more until a commit."""
    sent: deque[pb.Verdict] = field(default_factory=deque)
    """Verdicts that the owner has not acknowledged, oldest first."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt's tokens, if they are wanted."""
    wanted_token_s: float = 0.0
    """Mean seconds per token that the request wants; 0: none."""
    gate: GateState | None = None
    """State at the gate; None before the first token, and for a session that never speculates."""
    misses: MissRecord = field(default_factory=MissRecord)
    """Record of waits for the draft."""
    wanted_drafters: frozenset[str] | None = None
    """Names of sources that the client allows; None: all."""
    sources: str = ""
    """Names of all sources of the session, separated by blanks; a part of its kind at the gate."""
    prediction: Sequence[int] = ()
    """Token ids of the text that the client expects."""
    own_records: dict[str, OwnRecord] = field(default_factory=dict)
    """Acceptance in this session, by source."""
    drafter_calls: list[DrafterCall] = field(default_factory=list)
    """Calls of the target's own sources for the next step."""
    apart: ApartFollower | None = None
    """Its constraint, if that is too costly for the step's thread; `grammar` is None then."""
    num_walks: int = 0
    """Number of steps that decided tokens of the session."""
    drafted_s: float = 0.0
    """Seconds spent in the target's own draft since the last verdict."""
    state: SessionState = field(default=SessionState.FORKING, init=False)
    hold_off: HoldOff | None = field(default=None, init=False)
    """The wait of the next step; set while the state is HELD."""
    _seq: EngineSequence | None = field(default=None, init=False)

    @property
    def seq(self) -> EngineSequence:
        """The engine's sequence: tokens and KV. Raises RuntimeError when FORKING or ENDED."""
        if self._seq is None:
            raise RuntimeError(f"session {self.session_id} is {self.state.name} and has no sequence")
        return self._seq

    @property
    def has_seq(self) -> bool:
        """Whether the session is neither FORKING nor ENDED."""
        return self._seq is not None

    @property
    def token_ids(self) -> list[int]:
        """Committed tokens, prompt included."""
        return self._seq.token_ids if self._seq is not None else list(self.body.token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of committed tokens, prompt included."""
        return len(self._seq.token_ids) if self._seq is not None else len(self.body.token_ids)

    def urgency(self, now_s: float) -> float:
        """Worth of the next token by `policy/urgency.py`."""
        if not self.wanted_token_s or self.times.first_verdict_at_s is None:
            return 1.0
        num_tokens = self.num_tokens - self.times.num_first_tokens
        return urgency(self.wanted_token_s, now_s - self.times.first_verdict_at_s, num_tokens)

    def may_use(self, source: str) -> bool:
        """Whether the client allows a draft or a drafter as a source."""
        return self.wanted_drafters is None or source in self.wanted_drafters

    @property
    def is_answered(self) -> bool:
        """Whether the draft sends no more proposals below the last committed token."""
        return self.num_answered == self.num_tokens

    def held_s(self, now_s: float) -> float:
        """Seconds that the next step has waited for a draft: held off, or for the target's own draft."""
        return self.drafted_s + (0.0 if self.hold_off is None else now_s - self.hold_off.since_s)

    def update_pause(self) -> None:
        """Pause without credit, mask or an owner that reads; else go on. The first output token needs no credit, but
        the prompt's log-probabilities before it do.
        """
        if self._seq is None:
            return
        is_starved = self.num_tokens >= max(self.credit_position, self.end.num_prompt_tokens + 1)
        if self.state is SessionState.PREFILL and self.prompt_logprobs is not None:
            is_starved = is_starved or self.prompt_logprobs.is_starved
        awaits_mask = self.apart is not None and self.apart.mask is None
        self._seq.paused = is_starved or awaits_mask or not self.may_step

    def begin(self, seq: EngineSequence) -> None:
        """Take a sequence: PREFILL."""
        self._seq, self.state = seq, SessionState.PREFILL

    def decided(self, now_s: float) -> None:
        """Note that a verdict was sent: DECIDED."""
        self.state, self.hold_off, self.drafted_s = SessionState.DECIDED, None, 0.0
        self.times.last_verdict_at_s = now_s
        if self.times.first_verdict_at_s is None:
            self.times.first_verdict_at_s, self.times.num_first_tokens = now_s, self.num_tokens

    def plan(self, hold_off: HoldOff | None) -> None:
        """Plan the next step, with a hold-off or without: HIT, MISS or HELD."""
        self.hold_off = hold_off
        if hold_off is not None:
            self.state = SessionState.HELD
        else:
            self.state = SessionState.HIT if self.tree.nodes else SessionState.MISS

    def finish(self) -> EngineSequence | None:
        """End the session: ENDED. Returns its sequence, if it had one, for the caller to free."""
        seq, self._seq = self._seq, None
        self.state, self.hold_off = SessionState.ENDED, None
        return seq
