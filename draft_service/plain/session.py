"""A session of a draft without a model."""

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
    """One choice of a request, as the drafters see it."""

    context: Context
    token_ids: list[int]
    """Committed tokens: the same list as the context's."""
    mode: VerifyMode
    """The target's verification. In rejection mode proposals are chains of point masses."""
    most_tokens: int
    """Tokens of prompt and output at most."""
    max_depth: int
    """Greatest depth of a tree; 0: no drafts are wanted."""
    parts: list[Part] = field(default_factory=list)
    is_suspended: bool = False
    """The target has suspended speculation."""
    is_due: bool = True
    """Its drafters are asked at the next step."""
    told: tuple[int, int, bool] = (0, 0, False)
    """The last proposal's committed length, number of nodes and completeness."""
    committed_at_s: float | None = None
    """Monotonic time of the last commit; None once a proposal has answered it."""

    @property
    def num_committed(self) -> int:
        """Tokens that are final."""
        return len(self.token_ids)


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
