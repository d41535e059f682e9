"""Turns an OpenSession into a session of the draft."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from specdec.config import DraftSettings
from specdec.drafting.role.session import DraftSession, FollowingSession
from specdec.engine.sampling.token_history import TokenHistory
from specdec.replica.worker.opening import check_open, sampling_params, verify_mode
from specdec.replica.worker.sessions import Owner
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import SamplingParams, VerifyMode

_NUM_IN_A_ROW = 4
"""Sessions in a row suspended by their first commit, after which new ones wait for theirs."""
_MOST_KINDS = 1024

Kind = tuple[str, str, int, float]


@dataclass(frozen=True, slots=True)
class Opening:
    """A checked OpenSession."""

    params: SamplingParams
    mode: VerifyMode
    history: TokenHistory
    max_chain: int | None
    """See `DraftSession.max_chain`."""


def read_opening(body: pb.OpenSession, identity: pb.ModelIdentity, settings: DraftSettings) -> Opening:
    """Check an OpenSession.

    Raises:
        SessionFailure: a field is out of range; names it.
    """
    check_open(
        body,
        vocab_size=identity.vocab_size,
        max_model_len=identity.max_model_len,
        eos_token_ids=identity.eos_token_ids,
    )
    params = sampling_params(body, tuple(identity.eos_token_ids))
    history = TokenHistory(body.token_ids[: body.num_prompt_tokens])
    history.append(body.token_ids[body.num_prompt_tokens :])
    mode = verify_mode(body, params, VerifyMode(settings.verify_mode))
    wanted = body.max_draft_tokens if body.HasField("max_draft_tokens") else settings.max_draft_tokens
    # The chain's length in rejection mode; in coupled mode the growth policy obeys the same settings.
    limit = min(wanted, settings.max_draft_tokens, settings.max_proposal_nodes, settings.max_ahead_tokens)
    return Opening(params, mode, history, limit if mode is VerifyMode.REJECTION or limit == 0 else None)


def new_session(
    owner: Owner,
    session_id: str,
    epoch: int,
    body: pb.OpenSession,
    *,
    identity: pb.ModelIdentity,
    settings: DraftSettings,
    now_s: float,
) -> DraftSession:
    """Check an OpenSession and make its session, which has no head yet.

    `now_s`: monotonic time.

    Raises:
        SessionFailure: a field is out of range; names it.
    """
    opening = read_opening(body, identity, settings)
    return DraftSession(
        session_id=session_id,
        epoch=epoch,
        owner=owner,
        body=body,
        params=opening.params,
        mode=opening.mode,
        history=opening.history,
        num_committed=len(body.token_ids),
        max_chain=opening.max_chain,
        committed_at_s=now_s,
    )


class Beginnings:
    """Decides whether new sessions are worth computing a prompt: not if their target keeps suspending such sessions.

    Counts suspended sessions in a row by target and kind of request. A forgotten count costs one prompt.

    Lossless: a session that waits for its first commit guesses later, but the same tokens.
    """

    def __init__(self) -> None:
        self._in_a_row: OrderedDict[Kind, int] = OrderedDict()

    def opened(self, session: FollowingSession) -> bool:
        """A session begins. Returns whether it is suspended until its first commit."""
        session.is_suspended = self._in_a_row.get(_kind_of(session), 0) >= _NUM_IN_A_ROW
        return session.is_suspended

    def heard(self, session: FollowingSession, is_suspended: bool) -> None:
        """Note whether a session's first commit suspended it; later commits are ignored."""
        if session.has_heard:
            return
        session.has_heard = True
        kind = _kind_of(session)
        self._in_a_row[kind] = self._in_a_row.get(kind, 0) + 1 if is_suspended else 0
        self._in_a_row.move_to_end(kind)
        if len(self._in_a_row) > _MOST_KINDS:
            self._in_a_row.popitem(last=False)


def _kind_of(session: FollowingSession) -> Kind:
    body = session.body
    return session.owner.owner_id, body.target, body.verify_mode, round(body.sampling.temperature, 1)
