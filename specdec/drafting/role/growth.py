"""How far, and where, a draft grows its tree of guesses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class GrowthPolicy:
    """Bounds of a session's tree."""

    max_ahead_tokens: int
    """Deepest node. It exceeds what the target verifies in one step, so that a fully accepted block finds its successor
    under way."""
    max_nodes: int
    """Most nodes of a tree."""
    max_heads: int
    """Most places that grow at once, over all sessions: the main path first, then the outcomes likely to follow a
    verdict (a runner-up instead of the first guess), so that most verdicts find their continuation at the target."""
    min_path_score: float = 0.02
    """A path stops where the estimated probability that all of it is accepted falls below this: a target would not
    verify it, and after the next commit it would most likely be thrown away."""
    min_branch_score: float = 0.04
    """The same, for starting a branch."""
    min_new_steps: int = 2
    """A proposal costs every process between draft and target; one step's guesses are rarely worth that."""

    @property
    def node_limit(self) -> int:
        """Nodes at which a tree stops growing: every head may add one in the step that reaches it."""
        return max(1, self.max_nodes - self.max_heads)

    def max_depth(self, target_credit: int | None) -> int:
        """Deepest node, given how many draft tokens per session the target last found worth verifying in a step."""
        if target_credit is None:
            return self.max_ahead_tokens
        return min(self.max_ahead_tokens, 2 * target_credit + 1)

    def grows(self, depth: int, path_score: float, num_nodes: int, target_credit: int | None = None) -> bool:
        """Whether a leaf at `depth` is worth a further token."""
        return (
            depth < self.max_depth(target_credit) and path_score >= self.min_path_score and num_nodes < self.node_limit
        )

    def num_branches(self, num_sessions: int) -> int:
        """How many heads a session may have besides its main one."""
        return max(0, self.max_heads // max(1, num_sessions) - 1)

    def pick_branches(
        self, path_scores: Sequence[float], taken: Iterable[int], is_closed: Sequence[bool], num_free: int
    ) -> list[int]:
        """The likeliest leaves to grow next.

        Args:
            path_scores: of all nodes.
            taken: nodes that have children, or a head already.
            is_closed: nodes that nothing can follow.
            num_free: most leaves to pick.
        """
        excluded = set(taken)
        leaves = [
            (score, -node)
            for node, score in enumerate(path_scores)
            if score >= self.min_branch_score and node not in excluded and not is_closed[node]
        ]
        return [-negative for _, negative in sorted(leaves, reverse=True)[:num_free]]

    def is_worth_sending(self, num_unsent_steps: int) -> bool:
        """Whether to send what no proposal has carried yet, while the tree still grows."""
        return num_unsent_steps >= self.min_new_steps


class Credited(Protocol):
    """A session whose target says how much is worth drafting."""

    body: pb.OpenSession
    target_credit: int | None


def note_target_loads(sessions: Iterable[Credited], message: Any) -> None:
    """The load that a target reported bounds how far ahead its sessions are drafted; one with no name has all."""
    held = list(sessions)
    if message.HasField("target_load"):
        for session in held:
            session.target_credit = message.target_load.draft_credit
    if message.target_loads:
        credits = {told.target: told.load.draft_credit for told in message.target_loads}
        for session in held:
            session.target_credit = credits.get(session.body.target, session.target_credit)
