"""Whether what a target decided is a decision at all: it is the only one who knows the tokens, and may be broken."""

from __future__ import annotations

from specdec.coordinator.sessions.session import Session
from specdec.coordinator.sessions.step_told import tree_fault
from specdec.v1 import common_pb2 as pb

_ENDS = (pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
_MOST_ORIGIN = 255
"""The journal keeps a byte of each; newer targets may know more of them than we do."""
_MOST_DEPTHS = 64
"""Of a tree: as many as a proposal has nodes. Each depth is a series of the metrics."""

_MOST_DRAFTERS = 64
_MOST_NAME_CHARS = 32


def fault_of(session: Session, verdict: pb.Verdict) -> str | None:
    """Why a verdict does not go on from what was delivered, or is none that a working target sends; None if it is one.

    What it says besides its tokens is counted, shown and summed up, so that it is bounded here. Runs for each verdict:
    its cost is that of comparing the tokens that are known already, of which there are none but after a reconnect.
    """
    sampling, token_ids = session.sampling, verdict.token_ids
    num_known = session.position - verdict.start_position
    if num_known < 0:
        return f"verdict starts at {verdict.start_position}, expected {session.position}"
    num_left = sampling.max_tokens - session.num_output_tokens - max(0, len(token_ids) - num_known)
    if num_left < 0:
        return f"verdict goes past max_tokens, which is {sampling.max_tokens}"
    if verdict.finish_reason not in _ENDS:
        return f"verdict ends the choice for reason {verdict.finish_reason}, which is none of a target's"
    if num_left == 0 and not verdict.finish_reason:
        return f"verdict does not end the choice at max_tokens, which is {sampling.max_tokens}"
    vocab_size = session.request.model.vocab_size
    if token_ids and max(token_ids) >= vocab_size:
        return f"verdict has token {max(token_ids)}, outside the vocabulary of {vocab_size}"
    if len(verdict.origins) != len(token_ids):
        return "verdict does not say where its tokens came from"
    if token_ids and not 0 <= min(verdict.origins) <= max(verdict.origins) <= _MOST_ORIGIN:
        return "verdict says that tokens come from nowhere"
    if len(verdict.logprobs) != (len(token_ids) if sampling.HasField("num_logprobs") else 0):
        return f"verdict has log-probabilities for {len(verdict.logprobs)} of its {len(token_ids)} tokens"
    if any(len(position.top) > sampling.num_logprobs for position in verdict.logprobs):
        return f"verdict has more than {sampling.num_logprobs} alternatives for a token"
    if len(verdict.verified_by_depth) > _MOST_DEPTHS:
        return f"verdict counts {len(verdict.verified_by_depth)} depths of a tree"
    if session.request.with_steps and (fault := tree_fault(verdict.tree, vocab_size)) is not None:
        return fault
    num_drafted = sum(origin == pb.ORIGIN_DRAFT for origin in verdict.origins) if verdict.accepted_by else 0
    if len(verdict.accepted_by) != num_drafted:
        return f"verdict names {len(verdict.accepted_by)} drafters for {num_drafted} tokens"
    if len(verdict.drafters) > _MOST_DRAFTERS:
        return f"verdict tells of {len(verdict.drafters)} drafters"
    if not all(map(_is_name, (*verdict.accepted_by, *(record.name for record in verdict.drafters)))):
        return "verdict names a drafter that has no such name"
    known = session.token_ids[verdict.start_position :][: len(token_ids)] if num_known else []
    if known != list(token_ids[:num_known]):
        return f"verdict differs from what was delivered from {verdict.start_position} on"
    return None


def _is_name(name: str) -> bool:
    return 0 < len(name) <= _MOST_NAME_CHARS and name.isascii() and name.replace("_", "a").isalnum()
