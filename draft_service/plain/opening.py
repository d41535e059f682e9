"""Turns an OpenSession into a session of a draft without a model."""

from __future__ import annotations

import time

from specdec.config import DraftSettings
from specdec.draft_service.plain.session import PlainSession
from specdec.drafting.interface import Context
from specdec.replica.worker.opening import check_open, sampling_params, verify_mode
from specdec.replica.worker.sessions import Owner
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import VerifyMode


def new_session(
    owner: Owner, session_id: str, epoch: int, body: pb.OpenSession, identity: pb.ModelIdentity, settings: DraftSettings
) -> PlainSession:
    """Check an OpenSession and make its session. Raises SessionFailure, which names the field."""
    eos = tuple(identity.eos_token_ids)
    check_open(body, vocab_size=identity.vocab_size, max_model_len=identity.max_model_len, eos_token_ids=eos)
    params = sampling_params(body, eos)
    wanted = body.max_draft_tokens if body.HasField("max_draft_tokens") else settings.max_draft_tokens
    token_ids = list(body.token_ids)
    return PlainSession(
        session_id=session_id,
        epoch=epoch,
        owner=owner,
        context=Context(token_ids, body.num_prompt_tokens, body.cache_salt),
        token_ids=token_ids,
        mode=verify_mode(body, params, VerifyMode(settings.verify_mode)),
        most_tokens=min(identity.max_model_len, body.num_prompt_tokens + params.max_tokens),
        max_depth=0 if min(wanted, settings.max_draft_tokens) == 0 else settings.max_ahead_tokens,
        committed_at_s=time.monotonic(),
    )
