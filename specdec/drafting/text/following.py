"""Committed tokens, followed by a session that drafts text."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafting.text.bridge import LOOK_BACK, TextBridge
from specdec.drafting.text.session import TextSession
from specdec.engine.engine import Engine


def follow(engine: Engine, bridge: TextBridge, session: TextSession, new: list[int]) -> None:
    """Take over committed tokens: what of the draft's pieces they confirm stays, and all else that was drafted goes.

    Raises:
        SequenceTooLong: the draft's context cannot hold the text.
    """
    seq, drafted, num_pieces = session.seq, session.drafted, len(session.pieces)
    num_kept, written = bridge.follow(session.pieces, drafted, new, max(1, seq.num_final_tokens))
    if num_kept > num_pieces and not written:  # the drafted text goes on behind what was committed
        num_taken = num_kept - num_pieces
        session.pieces += drafted[:num_taken]
        session.drafted, session.scores = drafted[num_taken:], session.scores[num_taken:]
        session.times_us = session.times_us[num_taken:]
        missing = session.pieces[len(seq.token_ids) :]
    else:
        session.pieces = [*[*session.pieces, *drafted][:num_kept], *written]
        session.forget_drafted()
        num_held = min(num_kept, len(seq.token_ids))
        engine.rollback(seq, num_held)
        missing = session.pieces[num_held:]
    if missing:
        engine.append(seq, [joint_id for joint_id, _ in missing])
    session.token_ids += new
    session.is_over &= bool(session.drafted)
    session.written = bridge.written(session.token_ids, session.drafted)
    engine.finalize(seq, max(seq.num_final_tokens, len(session.pieces) - LOOK_BACK))


def num_equal(drafted: Sequence[int], committed: Sequence[int]) -> int:
    """How many tokens, from the first on, are the same."""
    pairs = zip(drafted, committed, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(committed)))
