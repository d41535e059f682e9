"""Trace attributes of a target's session."""

from __future__ import annotations

from specdec.replica.worker.trace import SessionTrace
from specdec.target_service.records.step_record import StepRecord
from specdec.target_service.session import TargetSession
from specdec.v1 import common_pb2 as pb


def trace_verdict(trace: SessionTrace, verdict: pb.Verdict) -> None:
    """Add a verdict to the trace's sums. Cost: about 2 us, for traced sessions only."""
    trace.prefilled()
    trace.add(
        num_steps=1,
        num_verify_steps=int(bool(verdict.verified_by_depth)),
        num_tokens=len(verdict.token_ids),
        num_verified=sum(verdict.verified_by_depth),
        num_accepted=verdict.num_accepted,
        num_hits=int(verdict.hit),
        num_wasted=verdict.num_wasted,
        step_s=verdict.step_us / 1e6,
        hold_off_s=verdict.hold_off_us / 1e6,
    )


def trace_preemptions(step: StepRecord) -> None:
    """Count a step's preemptions in the traces of the preempted sessions."""
    for session in step.preempted:
        if session.trace is not None:
            session.trace.add(num_preemptions=1)


def trace_end(trace: SessionTrace, session: TargetSession) -> None:
    """Add the final attributes, while the session still has its sequence."""
    if session.times.first_step_at_s is not None:
        trace.stepped(session.times.first_step_at_s)
    seq = session.seq if session.has_seq else None
    trace.add(
        num_prompt_tokens=session.body.num_prompt_tokens,
        num_cached_tokens=0 if seq is None else seq.num_cached_tokens,
        num_kv_blocks=0 if seq is None else len(seq.block_ids),
        num_preemptions=0,
    )
    trace.attributes["specdec.verify_mode"] = session.mode.value
