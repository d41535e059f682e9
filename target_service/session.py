"""A session as the target holds it."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.engine.sampling.token_history import TokenHistory
from specdec.engine.sequence import Sequence as EngineSequence
from specdec.replica.worker.sessions import EngineSession
from specdec.target_service.policy.acceptance import OwnRecord
from specdec.target_service.policy.gate_state import GateState
from specdec.target_service.policy.hold_off import HoldOff, MissRecord
from specdec.target_service.policy.marginal_gains import DrafterCall
from specdec.target_service.policy.urgency import urgency
from specdec.target_service.prompt_logprobs import PromptLogprobs
from specdec.target_service.tree.speculation_tree import ReadProposal, SpeculationTree
from specdec.target_service.tree.walk import EndOfChoice
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import RejectionMethod, SamplingParams, VerifyMode


class SessionState(enum.Enum):
    """Where a session stands: FORKING, PREFILL, then DECIDED and HIT, MISS or HELD in turns, at last ENDED."""

    FORKING = enum.auto()
    """It waits for its constraint, or for the prompt that another session computes, and has no sequence of its own."""
    PREFILL = enum.auto()
    """Its first token is not decided yet."""
    DECIDED = enum.auto()
    """A verdict was sent; what its next step waits for is not planned."""
    HIT = enum.auto()
    """Planned: a usable proposal was at hand when its next step could first be formed."""
    MISS = enum.auto()
    """Planned: there was none, and the step is not held off for one."""
    HELD = enum.auto()
    """Planned: there was none, and the step is held off for one, as `TargetSession.hold_off` says."""
    ENDED = enum.auto()
    """Its sequence is freed."""


@dataclass(slots=True)
class SessionTimes:
    """Times of time.monotonic, in seconds."""

    opened_at_s: float
    first_step_at_s: float | None = None
    first_verdict_at_s: float | None = None
    num_first_tokens: int = 0
    """Tokens of the session at its first verdict."""
    last_verdict_at_s: float | None = None
    told_at_s: float = 0.0
    """When its owner was last told what it is doing."""


@dataclass(slots=True, eq=False, kw_only=True)
class TargetSession(EngineSession):
    """One choice while it decodes. `begin`, `decided`, `plan` and `finish` are all that change its state."""

    body: pb.OpenSession
    """The message that opened it; its tokens are the session's until there is a sequence."""
    params: SamplingParams
    """How tokens are picked."""
    mode: VerifyMode
    """How they are verified."""
    rejection_method: RejectionMethod
    """And how so in rejection mode."""
    end: EndOfChoice
    """When the choice ends."""
    history: TokenHistory
    """Token counts for penalties and positions."""
    tree: SpeculationTree
    """Proposals below the last committed token."""
    max_nodes: int
    """Most nodes verified in one step; 0 without speculation."""
    has_draft: bool
    """A draft service has it, or has sent something for it: steps may wait for proposals."""
    credit_position: int
    """The session pauses when it has committed this many tokens."""
    times: SessionTimes
    arrived: bytes | ReadProposal | None = None
    """The latest proposal not yet in the tree; it carries all that earlier ones did. Read, if there was time for it."""
    num_answered: int = 0
    """Its length when its draft last said that nothing more will come until a commit."""
    sent: deque[pb.Verdict] = field(default_factory=deque)
    """Verdicts that the owner has not acknowledged, oldest first."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt's tokens, if they are wanted."""
    wanted_token_s: float = 0.0
    """Mean time per token that its request wants; 0: none."""
    gate: GateState | None = None
    """Whether it pays for it to speculate; None before its first token, and for one that never does."""
    misses: MissRecord = field(default_factory=MissRecord)
    """What waiting for its draft has brought."""
    wanted_drafters: frozenset[str] | None = None
    """Names of the target's own drafters that may propose for it; None: all."""
    sources: str = ""
    """Names of all that propose for it: what sessions gain depends on that."""
    prediction: Sequence[int] = ()
    """Text that its client expects."""
    own_records: dict[str, OwnRecord] = field(default_factory=dict)
    """What became of what each source proposed for it."""
    drafter_calls: list[DrafterCall] = field(default_factory=list)
    """Calls of the target's own sources for its next step."""
    num_walks: int = 0
    """Steps that have decided tokens of it."""
    drafted_s: float = 0.0
    """Spent on drafts of the target's own since its last verdict."""
    state: SessionState = field(default=SessionState.FORKING, init=False)
    hold_off: HoldOff | None = field(default=None, init=False)
    """What its next step waits for; set while the state is HELD."""
    _seq: EngineSequence | None = field(default=None, init=False)

    @property
    def seq(self) -> EngineSequence:
        """Its tokens and KV. Raises RuntimeError when FORKING or ENDED."""
        if self._seq is None:
            raise RuntimeError(f"session {self.session_id} is {self.state.name} and has no sequence")
        return self._seq

    @property
    def has_seq(self) -> bool:
        """Whether it is neither FORKING nor ENDED."""
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
        """What its next token is worth, as `policy.urgency` has it."""
        if not self.wanted_token_s or self.times.first_verdict_at_s is None:
            return 1.0
        num_tokens = self.num_tokens - self.times.num_first_tokens
        return urgency(self.wanted_token_s, now_s - self.times.first_verdict_at_s, num_tokens)

    def may_use(self, source: str) -> bool:
        """Whether its client lets a draft or a drafter propose for it."""
        return self.wanted_drafters is None or source in self.wanted_drafters

    @property
    def is_answered(self) -> bool:
        """Whether its draft has said all that it will say below the last committed token."""
        return self.num_answered == self.num_tokens

    def held_s(self, now_s: float) -> float:
        """How long its next step has waited for a draft: held off, or while the target drafted itself."""
        return self.drafted_s + (0.0 if self.hold_off is None else now_s - self.hold_off.since_s)

    def update_pause(self) -> None:
        """Pause for want of credit or of an owner that reads, or go on. The first token of the output needs no credit,
        but for the prompt's log-probabilities before it.
        """
        if self._seq is None:
            return
        is_starved = self.num_tokens >= max(self.credit_position, self.body.num_prompt_tokens + 1)
        if self.state is SessionState.PREFILL and self.prompt_logprobs is not None:
            is_starved = is_starved or self.prompt_logprobs.is_starved
        self._seq.paused = is_starved or not self.may_step

    def begin(self, seq: EngineSequence) -> None:
        """Decode on a sequence from now on: PREFILL."""
        self._seq, self.state = seq, SessionState.PREFILL

    def decided(self, now_s: float) -> None:
        """A verdict was sent: DECIDED."""
        self.state, self.hold_off, self.drafted_s = SessionState.DECIDED, None, 0.0
        self.times.last_verdict_at_s = now_s
        if self.times.first_verdict_at_s is None:
            self.times.first_verdict_at_s, self.times.num_first_tokens = now_s, self.num_tokens

    def plan(self, hold_off: HoldOff | None) -> None:
        """What the next step waits for is known: HIT, MISS or HELD."""
        self.hold_off = hold_off
        if hold_off is not None:
            self.state = SessionState.HELD
        else:
            self.state = SessionState.HIT if len(self.tree) else SessionState.MISS

    def finish(self) -> EngineSequence | None:
        """ENDED; returns the sequence, if it had one, to be freed."""
        seq, self._seq = self._seq, None
        self.state, self.hold_off = SessionState.ENDED, None
        return seq
