"""Whether a commit continues what was committed before."""

from __future__ import annotations

from google.rpc import code_pb2

from specdec.drafting.session import DraftSession
from specdec.worker.errors import SessionFailure, invalid


class CommitConflict(SessionFailure):
    """A commit leaves a gap, or contradicts tokens that are final."""


def num_known(session: DraftSession, start: int, token_ids: list[int], vocab_size: int) -> int:
    """How many of a commit's tokens were committed before.

    Args:
        session: what the commit is for.
        start: position of its first token.
        token_ids: its tokens.
        vocab_size: of the draft.

    Raises:
        CommitConflict: as it says.
        SessionFailure: a token id is outside the vocabulary.
    """
    committed = session.num_committed
    if start > committed:
        message = f"commit.start_position: {start} leaves a gap after {committed} committed tokens"
        reason, code = "COMMIT_GAP", code_pb2.OUT_OF_RANGE
        raise CommitConflict(code, reason, message, field="commit.start_position", expected_position=committed)
    if any(token >= vocab_size for token in token_ids):
        raise invalid("commit.token_ids", "a token id is outside the vocabulary", expected_position=committed)
    overlap = min(committed - start, len(token_ids))
    if session.heads[0].seq.token_ids[start : start + overlap] != token_ids[:overlap]:
        message = "commit.token_ids: contradicts tokens that were committed before"
        reason, code = "COMMIT_MISMATCH", code_pb2.FAILED_PRECONDITION
        raise CommitConflict(code, reason, message, field="commit.token_ids", expected_position=committed)
    return overlap
