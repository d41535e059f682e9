"""Guesses that a constraint leaves no choice about: they need no logits, and are computed in one chunk."""

from __future__ import annotations

from specdec.drafting.role.growth import GrowthPolicy
from specdec.drafting.role.session import DraftSession, Head
from specdec.engine.engine import Engine
from specdec.engine.errors import EngineError
from specdec.wire.sampling_params import VerifyMode


def extend_forced(engine: Engine, growth: GrowthPolicy, session: DraftSession, head: Head) -> None:
    """Go on from a head with the tokens that must follow, as far as the tree may grow.

    In coupled mode only: a chain for rejection is as long as positions say, whatever the tokens drawn.
    """
    if session.grammar is None or session.mode is VerifyMode.REJECTION or session.max_chain is not None:
        return
    room = growth.max_depth(session.target_credit) - session.tree.depth(head.node)
    limit = max(0, min(room, growth.node_limit - len(session.tree)))
    for token in session.grammar.forced(head.seq.token_ids[session.num_committed :], limit):
        is_end = session.ends_choice(token, len(head.seq.token_ids) + 1)
        try:
            engine.append(head.seq, [token])
        except EngineError:  # the draft's context ends here
            head.is_over = True
            return
        head.node = session.add(head.node, token, 1.0, is_end, 0, None)
        if is_end:
            head.is_over = True
            return
