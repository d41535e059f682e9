"""How far a draft goes ahead of the last commit: a pure function."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrowthPolicy:
    """Bounds of a session's chain.

    Attributes:
        max_ahead_tokens: most tokens past the last committed one. It exceeds what the target verifies in one step, so
            that a fully accepted block finds its successor under way.
        min_path_score: in coupled mode the chain stops where the estimated probability that all of it is accepted falls
            below this: a target would not verify it, and after the next commit it would most likely be thrown away.
    """

    max_ahead_tokens: int
    min_path_score: float = 0.02
    min_new_tokens: int = 2
    """A proposal costs every process between draft and target; a token alone is rarely worth that."""

    def is_worth_sending(self, num_unsent: int) -> bool:
        """Whether to send the tokens that no proposal has carried yet, while the chain still grows."""
        return num_unsent >= self.min_new_tokens

    def wants_more(self, num_ahead: int, path_score: float, target_credit: int | None) -> bool:
        """Whether to draft one more token.

        Args:
            num_ahead: tokens drafted past the last committed one.
            path_score: estimated probability that all of them are accepted.
            target_credit: draft tokens per step that the target's last load report found worth their cost.
        """
        limit = self.max_ahead_tokens
        if target_credit is not None:
            limit = min(limit, 2 * target_credit + 1)
        return num_ahead < limit and path_score >= self.min_path_score
