"""What one step of a target took and brought: what its metrics and its models of time are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdec.engine.outputs import StepOutput
from target_service.policy.gate_state import GateState
from target_service.session import TargetSession


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, once its verdicts are sent. Times are in seconds."""

    output: StepOutput
    preempted: list[TargetSession]
    """Sessions that gave up their blocks for it."""
    due_at_s: float
    """When it was due, on the worker's clock."""
    elapsed_s: float
    """From choosing trees to deciding tokens."""
    turn_s: float
    """The same with merging proposals before it and sending verdicts after it."""
    held_s: float
    """The longest hold-off of the sessions that it decided for."""
    num_committed: list[int]
    """Tokens, by session that it decided for."""
    num_nodes: int
    """Verified, of all sessions."""
    are_free: list[bool]
    """Of which of these sessions nodes were verified though their drafts are suspended."""
    gates: list[GateState | None]
    """Where these sessions stand with the gate."""
    is_decode: bool
    """Every session in it had its first token before: it carried no prefill."""
    is_plain: bool
    """It verified nothing."""
    drafts_may_work: bool
    """Some session that is left has a use for a draft."""


StepObserver = Callable[[StepRecord], None]
"""Is told of every step."""
