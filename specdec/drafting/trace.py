"""What a draft tells of a traced session."""

from __future__ import annotations

from specdec.drafting.session import DraftSession
from specdec.worker.trace import SessionTrace


def trace_step(trace: SessionTrace, started_at_s: float, completes: bool) -> None:
    """A step computed tokens of the session; `completes`: all that it had to compute."""
    trace.stepped(started_at_s)
    trace.add(num_steps=1)
    if completes:
        trace.prefilled()


def trace_end(trace: SessionTrace, session: DraftSession) -> None:
    """Add what is known at the end, while the session still holds its sequences."""
    trace.add(
        num_prompt_tokens=session.body.num_prompt_tokens,
        num_cached_tokens=session.heads[0].seq.num_cached_tokens,
        num_kv_blocks=sum(len(head.seq.block_ids) for head in session.heads),
        num_preemptions=0,
    )
