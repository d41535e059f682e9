"""Rejection mode: tokens that the target may commit in place of a drawn one, below which chains are drafted ahead.

A verdict in rejection mode nearly always ends with a token that the draft did not draw: a correction, or the one after
the last verified token. The draft knows which tokens are likely there, its own likeliest ones beside the drawn one, and
drafts below them while the target computes. The chain is the one that the draft would draw after the verdict, with the
same random numbers (`GrowingLeaf.chain_start`), only sooner.

Which chains are drafted, and how far, depends on positions, ranks and numbers of tokens, and on the main chain's
distributions; never on a token of a chain drafted ahead. So chains are drafted ahead below the main chain only, not
below one another: two that begin at one position share random numbers (docs/rejection.md).
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.drafting.role.session import DraftSession

ACCEPTED = 0.75
"""Assumed probability that a drawn token is accepted."""
REPEATED = 0.5
"""Assumed probability that the token which the target draws itself, after the last verified one, is the drawn one."""
RUNNER_UP = 0.35
"""Assumed share of the likeliest other token among all others; that of the second one is its square, and so on."""


class Correction(NamedTuple):
    """A token in place of a drawn one."""

    score: float
    """Estimated probability that the target commits it, and all before it."""
    parent: int
    """Node of the draft's tree after which it comes."""
    token_id: int


def likeliest_correction(session: DraftSession, num_ranks: int, max_depth: int) -> Correction | None:
    """The likeliest token, not yet in the tree, that the target may commit in place of one of the main chain.

    Args:
        session: a session in rejection mode.
        num_ranks: most such tokens in place of one drawn token.
        max_depth: greatest depth of the token.
    """
    best: Correction | None = None
    above = 1.0
    tree, notes = session.tree, session.notes
    for node in session.main_path:
        parent, sample, depth = tree.parents[node], notes[node].sample, tree.depths[node]
        if sample is None or depth > max_depth:
            break
        stays = REPEATED if depth == session.num_verifying + 1 else ACCEPTED
        others = [token_id for token_id in sample.ids[: num_ranks + 1] if token_id != sample.token_id][:num_ranks]
        for rank, token_id in enumerate(others, 1):
            score = above * (1 - stays) * RUNNER_UP**rank
            if best is not None and score <= best.score:
                break
            if tree.child(parent, token_id) is None:
                best = Correction(score, parent, token_id)
                break
        above *= stays
    return best
