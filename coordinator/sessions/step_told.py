"""What clients are told of a step, if they ask for it, and whether what the target says of it can be so."""

from __future__ import annotations

from specdec.coordinator.sessions.session import Session
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_MOST_NODES = 64
_MOST_NAME_CHARS = 64


def step_told(session: Session, verdict: pb.Verdict, num_kept: int, now_s: float) -> api.DecodingStep | None:
    """A step, with the last of its tokens, which the session has already; None: the client does not want to know.

    Args:
        session: whose step it was.
        verdict: the step's last one.
        num_kept: how many of that verdict's tokens are new to the client.
        now_s: when it arrived, on the monotonic clock.
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
    """Why a tree is none that a working target tells of; None if it is one. Cost: linear in its nodes."""
    num = len(tree.token_ids)
    if num > _MOST_NODES:
        return f"verdict tells of a tree of {num} nodes"
    if len(tree.parents) != num or len(tree.scores) != num:
        return "verdict tells of a tree without a parent and a score for each node"
    if num and max(tree.token_ids) >= vocab_size:
        return f"verdict tells of token {max(tree.token_ids)}, outside the vocabulary of {vocab_size}"
    if not all(-1 <= parent < index for index, parent in enumerate(tree.parents)):
        return "verdict tells of a tree with a node before its parent"
    if not _names_fit(tree):
        return "verdict tells of a tree without a drafter for each node"
    verified = set(tree.verified)
    if len(verified) != len(tree.verified) or len(tree.logprobs) != len(verified):
        return "verdict tells of verified nodes without a log-probability each"
    if any(node >= num for node in verified):
        return "verdict tells of a verified node that its tree does not have"
    above = -1
    for node in tree.accepted:
        if node not in verified or tree.parents[node] != above:
            return "verdict tells of accepted nodes that are no path of verified ones"
        above = node
    return None


def _names_fit(tree: pb.StepTree) -> bool:
    """Whether each node has a drafter's name, or none has; targets of the last release do not tell."""
    names, places = tree.drafters, tree.proposed_by
    if not names and not places:
        return True
    return (
        len(places) == len(tree.token_ids)
        and len(names) <= _MOST_NODES
        and max(places, default=-1) < len(names)
        and all(len(name) <= _MOST_NAME_CHARS for name in names)
    )
