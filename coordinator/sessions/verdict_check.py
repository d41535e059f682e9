"""Check verdicts: the target alone decides the tokens, and it may be broken."""

from __future__ import annotations

from specdec.coordinator.sessions.session import Session
from specdec.coordinator.sessions.step_told import tree_fault
from specdec.v1 import common_pb2 as pb

_ENDS = (pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
_MOST_ORIGIN = 255
"""Largest origin: the journal keeps a byte of each, and newer targets may have new ones."""
_MOST_DEPTHS = 64
"""Depths of a tree, at most its nodes; the metrics have a series for each depth."""
_MOST_DRAFTERS = 64
"""Drafters in a verdict, at most."""
_MOST_NAME_CHARS = 32
"""Characters of a drafter's name, at most."""


def fault_of(session: Session, verdict: pb.Verdict) -> str | None:
    """Why a verdict does not continue the delivered tokens, or is malformed; None if it is sound.

    Its statistics are counted, shown and summed up, so they are bounded here. Runs for each verdict; its cost is linear
    in the verdict's tokens, and after a reconnect in the tokens it repeats.
    """
    sampling, token_ids = session.sampling, verdict.token_ids
    num_known = session.position - verdict.start_position
    if num_known < 0:
        return f"verdict starts at {verdict.start_position}, expected {session.position}"
    num_left = sampling.max_tokens - session.num_output_tokens - max(0, len(token_ids) - num_known)
    if num_left < 0:
        return f"verdict exceeds max_tokens {sampling.max_tokens}"
    if verdict.finish_reason not in _ENDS:
        return f"verdict ends the choice for reason {verdict.finish_reason}, which targets do not use"
    if num_left == 0 and not verdict.finish_reason:
        return f"verdict does not end the choice at max_tokens {sampling.max_tokens}"
    vocab_size = session.request.model.vocab_size
    if token_ids and max(token_ids) >= vocab_size:
        return f"verdict has token {max(token_ids)}, outside the vocabulary of {vocab_size}"
    if len(verdict.origins) != len(token_ids):
        return "verdict does not have one origin per token"
    if token_ids and not 0 <= min(verdict.origins) <= max(verdict.origins) <= _MOST_ORIGIN:
        return "verdict has an origin outside 0 to 255"
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
        return f"verdict has records of {len(verdict.drafters)} drafters"
    if not all(map(_is_name, (*verdict.accepted_by, *(record.name for record in verdict.drafters)))):
        return "verdict has a malformed drafter name"
    num_repeated = min(num_known, len(token_ids))
    known = session.token_ids[verdict.start_position : verdict.start_position + num_repeated]
    if known.tolist() != token_ids[:num_repeated]:
        return f"verdict differs from the delivered tokens from {verdict.start_position} on"
    return None


def _is_name(name: str) -> bool:
    return 0 < len(name) <= _MOST_NAME_CHARS and name.isascii() and name.replace("_", "a").isalnum()
