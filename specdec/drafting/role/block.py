"""Drafts a block of tokens in one pass, with masks for unknown tokens (PARD, arXiv:2504.18583).

A model trained for it predicts at a mask the token after it, from the tokens before the masks. The masks are nodes
below a head's last token that are never accepted, so that no committed token attends to one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specdec.drafting.role.growth import GrowthPolicy
from specdec.drafting.role.guess import Place
from specdec.drafting.role.session import DraftSession, GrowingLeaf
from specdec.engine.tree import TokenTree


class MaskBlock:
    """Adds masks below heads before a step."""

    def __init__(self, mask_token_id: int, num_tokens: int) -> None:
        """`num_tokens`: size of a block; its first token needs no mask."""
        self._mask_token_id = mask_token_id
        self._num_tokens = num_tokens

    def hang(self, places: Sequence[Place], growth: GrowthPolicy) -> None:
        """Add masks below each head: for all tokens that its limits allow."""
        for session, head in places:
            num_masks = min(self._num_tokens, self._room(session, head, growth)) - 1
            head.seq.tree = TokenTree([self._mask_token_id] * num_masks) if num_masks > 0 else None

    @staticmethod
    def _room(session: DraftSession, head: GrowingLeaf, growth: GrowthPolicy) -> int:
        if head.is_over:
            return 0
        depth = session.tree.depth(head.node)
        if session.max_chain is not None:
            most = session.max_depth(growth)
        else:
            most = min(growth.max_depth(session.target_credit), depth + growth.node_limit - len(session.tree))
        limit = session.body.num_prompt_tokens + session.params.max_tokens
        return min(most - depth, limit - len(head.seq.token_ids))


def rounds_of(places: Sequence[Place], num_masks: Sequence[int]) -> Iterator[list[int]]:
    """Yield by round the indices of `places` to guess: first from their own rows, then from each mask's row.

    The caller adds a round's guesses to the trees before it asks for the next. Heads leave that have ended, were
    dropped or hold other tokens than their guesses.
    """
    lengths = [len(head.seq.token_ids) for _, head in places]
    yield list(range(len(places)))
    for number in range(1, 1 + max(num_masks)):
        going = [
            index
            for index, (session, head) in enumerate(places)
            if num_masks[index] >= number
            and any(head is other for other in session.heads)
            and not head.is_over
            and not head.seq.paused
            and len(head.seq.token_ids) == lengths[index] + number
        ]
        if not going:
            return
        yield going
