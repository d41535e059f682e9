"""A session as drafters without a model hold it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from specdec.config import DraftSettings
from specdec.drafting.interface import Context, SessionDrafter
from specdec.replica.worker.opening import check_open, sampling_params, verify_mode
from specdec.replica.worker.sessions import EngineSession, Owner
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import VerifyMode


@dataclass(slots=True)
class Part:
    """A drafter's part of a session."""

    name: str
    drafter: SessionDrafter


@dataclass(slots=True, eq=False, kw_only=True)
class PlainSession(EngineSession):
    """One choice while its continuation is looked up or asked for."""

    context: Context
    token_ids: list[int]
    """Committed tokens; those of the context."""
    mode: VerifyMode
    """How the target verifies: in rejection mode chains only, each token a point mass."""
    most_tokens: int
    """Length of the sequence when it is over."""
    max_depth: int
    """Of a tree; 0: it wants no drafts."""
    parts: list[Part] = field(default_factory=list)
    is_suspended: bool = False
    """Nobody wants proposals now."""
    is_due: bool = True
    """Its drafters are asked at the next step."""
    told: tuple[int, int, bool] = (0, 0, False)
    """Committed tokens and nodes of the last proposal, and whether it was complete."""
    committed_at_s: float | None = None
    """When the last commit arrived, until a proposal answers it."""

    @property
    def num_committed(self) -> int:
        """Tokens that are final."""
        return len(self.token_ids)


def new_session(
    owner: Owner, session_id: str, epoch: int, body: pb.OpenSession, identity: pb.ModelIdentity, settings: DraftSettings
) -> PlainSession:
    """Check an OpenSession and make the session that it asks for. Raises SessionFailure, which names the field."""
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
