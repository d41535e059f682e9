"""Bounds on a draft's tree of guesses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class GrowthPolicy:
    """Bounds of a session's tree."""

    max_ahead_tokens: int
    """Greatest depth of a node; deeper than the target verifies in a step, so that drafting continues during
    verification.
    """
    max_nodes: int
    """Most nodes of a tree."""
    max_heads: int
    """Heads that grow at once, over all sessions. Beside the main path they grow likely runners-up, so that most
    verdicts find their continuation already drafted.
    """
    min_path_score: float = 0.02
    """Probability that all of a path is accepted, below which the path stops: the target would hardly verify more."""
    min_branch_score: float = 0.04
    """Path probability below which no branch is started."""
    min_new_steps: int = 2
    """Steps with new guesses per proposal; each message costs time in every process on its way."""

    @property
    def node_limit(self) -> int:
        """Nodes at which a tree stops growing; each head may exceed it by one in the last step."""
        return max(1, self.max_nodes - self.max_heads)

    def max_depth(self, target_credit: int | None) -> int:
        """Greatest depth. `target_credit`: draft tokens per step that the target last found worth verifying."""
        if target_credit is None:
            return self.max_ahead_tokens
        return min(self.max_ahead_tokens, 2 * target_credit + 1)

    def grows(self, depth: int, path_score: float, num_nodes: int, target_credit: int | None = None) -> bool:
        """Whether a leaf at `depth` is worth a further token."""
        return (
            depth < self.max_depth(target_credit) and path_score >= self.min_path_score and num_nodes < self.node_limit
        )

    def num_branches(self, num_sessions: int) -> int:
        """Heads that a session may have besides its main one."""
        return max(0, self.max_heads // max(1, num_sessions) - 1)

    def pick_branches(
        self, path_scores: Sequence[float], taken: Iterable[int], is_closed: Sequence[bool], num_free: int
    ) -> list[int]:
        """The likeliest leaves to grow next.

        Args:
            path_scores: path probabilities of all nodes.
            taken: nodes with children or a head.
            is_closed: by node, whether nothing can follow it.
            num_free: number of leaves to pick at most.
        """
        excluded = set(taken)
        leaves = [
            (score, -node)
            for node, score in enumerate(path_scores)
            if score >= self.min_branch_score and node not in excluded and not is_closed[node]
        ]
        return [-negative for _, negative in sorted(leaves, reverse=True)[:num_free]]

    def is_worth_sending(self, num_unsent_steps: int) -> bool:
        """Whether to send unsent guesses while the tree still grows."""
        return num_unsent_steps >= self.min_new_steps


class Credited(Protocol):
    """A session whose target reports its draft credit."""

    body: pb.OpenSession
    target_credit: int | None


def note_target_loads(sessions: Iterable[Credited], message: Any) -> None:
    """Take the load of targets: it bounds how far ahead their sessions are drafted.

    `target_load` has no target's name and applies to all sessions.
    """
    held = list(sessions)
    if message.HasField("target_load"):
        for session in held:
            session.target_credit = message.target_load.draft_credit
    if message.target_loads:
        credits = {told.target: told.load.draft_credit for told in message.target_loads}
        for session in held:
            session.target_credit = credits.get(session.body.target, session.target_credit)
