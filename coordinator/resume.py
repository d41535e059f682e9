"""Taking up an interrupted request: proof that it was ours, and agreement on the tokens.

A resume token is a MAC over request id, seed, model identity and tenant, so that any coordinator with the
same secret can check it without a store.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from specdec.rpc.errors import DataLoss, InvalidRequest
from specdec.v1 import common_pb2 as pb


def make_resume_token(secret: bytes, tenant: str, request_id: str, seed: int, identity: pb.ModelIdentity) -> bytes:
    """The token that the first chunk carries."""
    parts = (
        tenant,
        request_id,
        str(seed),
        identity.name,
        identity.revision,
        identity.weights_digest,
        identity.tokenizer_digest,
    )
    message = b"".join(len(data).to_bytes(4, "big") + data for data in (part.encode() for part in parts))
    return hmac.new(secret, message, hashlib.sha256).digest()


def check_resume_token(given: bytes, expected: bytes) -> None:
    """Compare in constant time.

    Raises:
        InvalidRequest: the token is of another request, seed, model, tenant or deployment.
    """
    if not hmac.compare_digest(given, expected):
        raise InvalidRequest(
            "resume.resume_token",
            "does not belong to this request id, seed, model and tenant",
            reason="RESUME_TOKEN_INVALID",
        )


def agree(choice: int, client_ids: Sequence[int], journal_ids: Sequence[int]) -> list[int]:
    """What client and journal hold of a choice: they must be equal where they overlap, and the longer wins.

    Raises:
        DataLoss: they differ; names the first position.
    """
    for index, (ours, theirs) in enumerate(zip(journal_ids, client_ids, strict=False)):
        if ours != theirs:
            raise DataLoss(
                f"choice {choice}: output token {index} is {theirs} for the client and {ours} in the journal",
                reason="TOKENS_DIFFER",
            )
    return list(journal_ids if len(journal_ids) > len(client_ids) else client_ids)
