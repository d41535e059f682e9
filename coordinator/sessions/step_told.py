"""The record of a step for clients that want it, and the check of a target's proposal tree."""

from __future__ import annotations

from specdec.coordinator.sessions.session import Session
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_MOST_NODES = 64
"""Nodes of a tree, at most."""
_MOST_NAME_CHARS = 64
"""Characters of a drafter's name, at most."""


def step_told(session: Session, verdict: pb.Verdict, num_kept: int, now_s: float) -> api.DecodingStep | None:
    """The record of a step whose tokens the session has already; None if the client wants none.

    Args:
            session: the step's session.
            verdict: the step's last verdict.
            num_kept: tokens of that verdict that are new to the client.
            now_s: monotonic time of the verdict's arrival.
    """
    request = session.request
    if not request.with_steps:
        return None
    num_tokens = num_kept + session.tally.num_partial_tokens
    return api.DecodingStep(
        start=session.num_output_tokens - num_tokens,
        num_tokens=num_tokens,
        tree=verdict.tree if verdict.HasField("tree") else None,
        at_us=max(0, round((now_s - request.arrived_s) * 1e6)),
        step_us=verdict.step_us,
        hold_off_us=verdict.hold_off_us,
        draft_us=verdict.draft_us,
        is_suspended=verdict.suspends_draft,
    )


def tree_fault(tree: pb.StepTree, vocab_size: int) -> str | None:
    """Why a tree is malformed, or None. Cost: linear in its nodes."""
    num = len(tree.token_ids)
    if num > _MOST_NODES:
        return f"verdict has a tree of {num} nodes"
    if len(tree.parents) != num or len(tree.scores) != num:
        return "verdict has a tree without a parent and a score for each node"
    if num and max(tree.token_ids) >= vocab_size:
        return f"verdict has a tree with token {max(tree.token_ids)}, outside the vocabulary of {vocab_size}"
    if not all(-1 <= parent < index for index, parent in enumerate(tree.parents)):
        return "verdict has a tree with a node before its parent"
    if not _names_fit(tree):
        return "verdict has a tree without a drafter for each node"
    verified = set(tree.verified)
    if len(verified) != len(tree.verified) or len(tree.logprobs) != len(verified):
        return "verdict has verified nodes without a log-probability each"
    if any(node >= num for node in verified):
        return "verdict has a verified node outside its tree"
    above = -1
    for node in tree.accepted:
        if node not in verified or tree.parents[node] != above:
            return "verdict has accepted nodes that are no path of verified ones"
        above = node
    return None


def _names_fit(tree: pb.StepTree) -> bool:
    """Whether each node has a drafter's name, or none has, as from targets of the last release."""
    names, places = tree.drafters, tree.proposed_by
    if not names and not places:
        return True
    return (
        len(places) == len(tree.token_ids)
        and len(names) <= _MOST_NODES
        and max(places, default=-1) < len(names)
        and all(len(name) <= _MOST_NAME_CHARS for name in names)
    )
