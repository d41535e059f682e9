"""What a draft tells of a traced session."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.engine.sequence import Sequence as EngineSequence
from specdec.worker.trace import SessionTrace


def trace_step(trace: SessionTrace, started_at_s: float, completes: bool) -> None:
    """A step computed tokens of the session; `completes`: all that it had to compute."""
    trace.stepped(started_at_s)
    trace.add(num_steps=1)
    if completes:
        trace.prefilled()


def trace_end(trace: SessionTrace, num_prompt_tokens: int, sequences: Sequence[EngineSequence]) -> None:
    """Add what is known at the end, while the session still holds its sequences, the main one first."""
    trace.add(
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=sequences[0].num_cached_tokens,
        num_kv_blocks=sum(len(seq.block_ids) for seq in sequences),
        num_preemptions=0,
    )
