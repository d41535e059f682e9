"""Times and tokens of one step of a target, for its metrics and its models of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.engine.outputs import StepOutput
from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.policy.gate_state import GateState
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import SessionState, TargetSession
from specdec.target_service.tree.speculation_tree import Hung


@dataclass(frozen=True, slots=True)
class Payoff:
    """Two times for the same tokens, in seconds, summed over the sessions that committed them."""

    decode_s: float
    """Seconds that the tokens took, hold-off included."""
    plain_s: float
    """Seconds that plain decoding of the same batch would have taken; plain_s / decode_s is the speed-up."""


@dataclass(slots=True)
class DrafterStep:
    """Record of a drafter for a session's present step."""

    name: str
    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    elapsed_s: float = 0.0
    window_tokens: float = 0.0
    """Cost of its window's rows, in tokens that the step could have decoded plainly meanwhile."""


@dataclass(slots=True)
class Taken:
    """What the verdict of a decision tells of its session as it was before it took the decision's tokens."""

    tree: Hung
    """The tree of which the decision's nodes were chosen."""
    start: int
    """Number of committed tokens."""
    state: SessionState
    last_at_s: float | None
    """Time of the decision before; None: there was none. Times are of time.monotonic."""
    began_at_s: float
    """Start of the step."""
    elapsed_s: float
    """Seconds of the step."""
    held_s: float
    """Seconds that the step was held off for this session's draft."""
    decided_at_s: float
    num_wasted: int
    """Number of proposed tokens that were dropped."""
    suspends_draft: bool
    """The draft shall propose nothing for the tokens that follow."""
    drafters: Sequence[DrafterStep]
    """Records of the target's drafters."""


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step after its decisions are committed. Times are in seconds."""

    output: StepOutput
    preempted: list[TargetSession]
    """Sessions whose blocks the step freed."""
    elapsed_s: float
    """Seconds from choosing trees to deciding tokens."""
    turn_s: float = 0.0
    """Seconds of the step, with merging proposals before it and committing after it."""
    held_s: float
    """Longest hold-off, in seconds, among the decided sessions."""
    num_committed: list[int]
    """Number of committed tokens of each decided session."""
    num_nodes: int
    """Number of verified nodes, over all sessions."""
    are_free: list[bool]
    """For each decided session, whether nodes were verified though its draft is suspended."""
    gates: list[GateState | None]
    """State at the gate of each decided session."""
    is_decode: bool
    """Whether the step had no prefill: every session had its first token before."""

    def payoff(self, plain_step_s: float) -> Payoff | None:
        """The step's time against that of plain decoding, a step of which takes `plain_step_s`; None for a step with
        prefill, which plain decoding would have too.

        Plain decoding would run one step of one row per session for each token. Every session waits for the longest
        hold-off of the batch, so each is charged with it.
        """
        if not self.is_decode:
            return None
        decode_s = len(self.num_committed) * (self.turn_s + self.held_s)
        return Payoff(decode_s=decode_s, plain_s=sum(self.num_committed) * plain_step_s)

    @classmethod
    def of(
        cls,
        output: StepOutput,
        decisions: Sequence[Decision],
        by_seq: Mapping[int, TargetSession],
        gate: SpeculationGate,
        *,
        preempted: list[TargetSession],
        due_at_s: float,
        elapsed_s: float,
    ) -> StepRecord:
        """The record before the decisions are committed, which ends hold-offs and prefills; `turn_s` is set later."""
        sessions = [decision.candidate.session for decision in decisions]
        gates = [session.gate for session in sessions]
        num_nodes = [decision.candidate.num_nodes for decision in decisions]
        return cls(
            output=output,
            preempted=preempted,
            elapsed_s=elapsed_s,
            held_s=max([session.held_s(due_at_s) for session in sessions], default=0.0),
            num_committed=[len(decision.walk.token_ids) for decision in decisions],
            num_nodes=sum(num_nodes),
            are_free=[number > 0 and not gate.is_open(state) for number, state in zip(num_nodes, gates, strict=True)],
            gates=gates,
            is_decode=all(
                item.num_new_tokens <= 1
                and (session := by_seq.get(item.seq.seq_id)) is not None
                and session.state is not SessionState.PREFILL
                for item in output.items
            ),
        )
