"""What one step of a target took and brought: what its metrics and its models of time are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specdec.engine.outputs import StepOutput
from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.policy.gate_state import GateState
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import SessionState, TargetSession


@dataclass(frozen=True, slots=True)
class Payoff:
    """Two times for the same tokens, in seconds, summed over the sessions that committed them."""

    decode_s: float
    """What they took, hold-off included."""
    plain_s: float
    """What plain decoding of the same batch would have taken; over decode_s it is the speed-up."""


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step, once its verdicts are sent. Times are in seconds."""

    output: StepOutput
    preempted: list[TargetSession]
    """Sessions that gave up their blocks for it."""
    elapsed_s: float
    """From choosing trees to deciding tokens."""
    turn_s: float = 0.0
    """The same with merging proposals before it and sending verdicts after it."""
    held_s: float
    """The longest hold-off of the sessions that it decided for."""
    num_committed: list[int]
    """Tokens, by session that it decided for."""
    num_nodes: int
    """Nodes verified, of all sessions."""
    are_free: list[bool]
    """Whether nodes of each of these sessions were verified though its draft is suspended."""
    gates: list[GateState | None]
    """States of these sessions with the gate."""
    is_decode: bool
    """Every session in it had its first token before: it carried no prefill."""

    def payoff(self, plain_step_s: float) -> Payoff | None:
        """What its tokens took, against plain decoding, a step of which takes `plain_step_s`; None for prefill, which
        plain decoding would have carried, too.

        Plain decoding would have run one step of one row per session for each token. Every session of the batch waits
        for the longest hold-off in it, so each is charged with that.
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
        """What is known before its verdicts are sent, which end hold-offs and prefills; the caller adds the rest."""
        gates = [decision.candidate.session.gate for decision in decisions]
        num_nodes = [decision.candidate.num_nodes for decision in decisions]
        return cls(
            output=output,
            preempted=preempted,
            elapsed_s=elapsed_s,
            held_s=max((decision.candidate.session.held_s(due_at_s) for decision in decisions), default=0.0),
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


StepObserver = Callable[[StepRecord], None]
"""Called for every step."""
