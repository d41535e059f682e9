"""From sampled tokens to a verdict: the walk down the verified tree, in both modes of verification.

Coupled (docs/architecture.md): the target's token at each node is a function of prompt, parameters, seed and position,
so a node is accepted iff it carries that token. Rejection (docs/rejection.md) accepts with probability min(1, p/q) and
otherwise draws from the residual. `reference.py` has both on one screen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.engine.tree import ROOT, TokenTree
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import SamplingParams


@dataclass(slots=True)
class Walk:
    """Tokens that a step commits for a session."""

    token_ids: list[int] = field(default_factory=list)
    """The committed tokens."""
    origins: list[pb.Origin.ValueType] = field(default_factory=list)
    """Origin of each committed token."""
    rows: list[int] = field(default_factory=list)
    """For each committed token, the node whose logits decided it; `ROOT`: the last committed token."""
    path: list[int] = field(default_factory=list)
    """Accepted nodes, from the root down."""
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    """Reason for which the last token ends the choice; UNSPECIFIED: it does not."""
    stop_token_id: int | None = None
    """Stop or end-of-sequence token that ended the choice."""


@dataclass(slots=True)
class EndOfChoice:
    """The conditions on tokens that end a choice."""

    params: SamplingParams
    """Stop tokens, ignore_eos and max_tokens."""
    num_prompt_tokens: int
    """Length of the prompt."""
    max_model_len: int
    """Most tokens of a sequence, prompt included."""
    token_ids: frozenset[int] = field(init=False)
    """Tokens that end the choice."""
    most_tokens: int = field(init=False)
    """Number of tokens, prompt included, with which the choice ends."""

    def __post_init__(self) -> None:
        params = self.params
        self.token_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else params.eos_token_ids)))
        self.most_tokens = min(self.num_prompt_tokens + params.max_tokens, self.max_model_len)

    def check(self, token_id: int, num_tokens: int) -> tuple[pb.FinishReason.ValueType, int | None]:
        """Finish reason and stop token if the choice ends with `token_id`, its token number `num_tokens` (prompt
        included); else UNSPECIFIED and None."""
        if token_id in self.token_ids:
            return pb.FINISH_REASON_STOP, token_id
        is_full = num_tokens >= self.most_tokens
        return (pb.FINISH_REASON_LENGTH if is_full else pb.FINISH_REASON_UNSPECIFIED), None

    def max_depth(self, num_tokens: int) -> int:
        """Most depth worth verifying after `num_tokens` committed tokens: one token always follows the last node."""
        return max(0, self.most_tokens - num_tokens - 1)


def walk_tree(
    tree: TokenTree,
    num_verified: int,
    decide: Callable[[int], int],
    end: EndOfChoice,
    num_tokens: int,
    plain_origin: pb.Origin.ValueType,
) -> Walk:
    """Walk from the root while the decided token is a verified node.

    Args:
        tree: a tree whose first `num_verified` nodes were verified.
        num_verified: number of nodes that the step verified.
        decide: function from a row (node, or `ROOT`) to the target's token at the next position.
        end: conditions that end the choice.
        num_tokens: committed tokens before the step.
        plain_origin: origin of the token when the step verified nothing.
    """
    token_ids: list[int] = []
    path: list[int] = []
    node, is_over, most = ROOT, False, end.most_tokens - num_tokens
    while not is_over:
        token = decide(node)
        token_ids.append(token)
        is_over = token in end.token_ids or len(token_ids) >= most
        child = tree.child(node, token) if num_verified else None
        if child is None or child >= num_verified:
            break
        node = child
        path.append(node)
    walk = Walk(token_ids, [pb.ORIGIN_DRAFT] * len(path), [ROOT, *path][: len(token_ids)], path)
    if len(path) < len(token_ids):
        is_recovered = node in tree.parents[:num_verified]
        bonus = pb.ORIGIN_BONUS if num_verified else plain_origin
        walk.origins.append(pb.ORIGIN_RECOVERED if is_recovered else bonus)
    if is_over:
        walk.finish_reason, walk.stop_token_id = end.check(token_ids[-1], num_tokens + len(token_ids))
    return walk
