"""Checks that a commit continues the committed tokens."""

from __future__ import annotations

from collections.abc import Sequence

from google.rpc import code_pb2

from specdec.replica.worker.errors import SessionFailure, invalid
from specdec.v1 import common_pb2 as pb


class CommitConflict(SessionFailure):
    """A commit leaves a gap, or contradicts committed tokens."""


def num_known(held: Sequence[int], committed: int, start: int, token_ids: list[int], vocab_size: int) -> int:
    """Number of a commit's tokens that were committed before.

    Args:
        held: the session's tokens; the committed ones first.
        committed: number of committed tokens.
        start: position of the commit's first token.
        token_ids: the commit's tokens.
        vocab_size: token ids must be below it.

    Raises:
        CommitConflict: the commit leaves a gap, or contradicts committed tokens.
        SessionFailure: a token id is outside the vocabulary.
    """
    if start > committed:
        message = f"commit.start_position: {start} leaves a gap after {committed} committed tokens"
        reason, code = "COMMIT_GAP", code_pb2.OUT_OF_RANGE
        raise CommitConflict(code, reason, message, field="commit.start_position", expected_position=committed)
    if any(token >= vocab_size for token in token_ids):
        raise invalid("commit.token_ids", "a token id is outside the vocabulary", expected_position=committed)
    overlap = min(committed - start, len(token_ids))
    if list(held[start : start + overlap]) != token_ids[:overlap]:
        message = "commit.token_ids: contradicts tokens that were committed before"
        reason, code = "COMMIT_MISMATCH", code_pb2.FAILED_PRECONDITION
        raise CommitConflict(code, reason, message, field="commit.token_ids", expected_position=committed)
    return overlap


def check_no_commit_is_lost(num_committed: int, seen: pb.AttachedSession) -> None:
    """Raise SessionFailure unless the session's owner has committed exactly `num_committed` tokens."""
    if seen.committed_length != num_committed:
        message = f"commits up to {seen.committed_length} were lost"
        raise SessionFailure(code_pb2.OUT_OF_RANGE, "COMMIT_GAP", message, expected_position=num_committed)
