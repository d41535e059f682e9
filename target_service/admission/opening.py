"""From an OpenSession to a session of the target."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.config import TargetSettings
from specdec.config.drafter_options import DRAFT_MODEL
from specdec.engine.sampling.token_history import TokenHistory
from specdec.replica.worker.opening import check_open, check_prediction, rejection_method, sampling_params, verify_mode
from specdec.replica.worker.sessions import Owner
from specdec.target_service.prompt_logprobs import PromptLogprobs
from specdec.target_service.session import SessionTimes, TargetSession
from specdec.target_service.tree.speculation_tree import SpeculationTree
from specdec.target_service.tree.walk import EndOfChoice
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import VerifyMode


def new_session(
    owner: Owner,
    session_id: str,
    epoch: int,
    body: pb.OpenSession,
    *,
    identity: pb.ModelIdentity,
    settings: TargetSettings,
    drafters: Iterable[str],
    now_s: float,
    piece_bytes: int,
) -> TargetSession:
    """Check an OpenSession and make the session that it asks for, which has no sequence yet.

    `drafters` are those that the target has, by name; `now_s` is of time.monotonic; the prompt's log-probabilities are
    told in parts of at most `piece_bytes`.

    Raises:
        SessionFailure: a field is out of range; names it.
    """
    check_open(
        body,
        vocab_size=identity.vocab_size,
        max_model_len=identity.max_model_len,
        eos_token_ids=identity.eos_token_ids,
    )
    check_prediction(body, vocab_size=identity.vocab_size, max_model_len=identity.max_model_len)
    params = sampling_params(body, tuple(identity.eos_token_ids))
    history = TokenHistory(body.token_ids[: body.num_prompt_tokens])
    history.append(body.token_ids[body.num_prompt_tokens :])
    mode = verify_mode(body, params, VerifyMode(settings.verify_mode))
    wanted = body.max_draft_tokens if body.HasField("max_draft_tokens") else settings.max_draft_tokens
    limit = min(wanted, settings.max_draft_tokens, settings.max_proposal_nodes)
    wants_prompt = body.HasField("num_prompt_logprobs") and body.prompt_logprobs_start < body.num_prompt_tokens
    wanted_drafters = frozenset(body.drafters) if body.drafters else None
    return TargetSession(
        session_id=session_id,
        epoch=epoch,
        owner=owner,
        body=body,
        params=params,
        mode=mode,
        rejection_method=rejection_method(body),
        end=EndOfChoice(params, body.num_prompt_tokens, identity.max_model_len),
        history=history,
        tree=SpeculationTree(identity.vocab_size, is_chain=mode is VerifyMode.REJECTION),
        max_nodes=limit if body.speculate else 0,
        has_draft=not body.has_no_draft,
        wanted_drafters=wanted_drafters,
        sources=sources_of(body, wanted_drafters, drafters),
        prediction=list(body.prediction_token_ids),
        wanted_token_s=body.time_per_token_us * 1e-6,
        credit_position=body.credit_position,
        times=SessionTimes(now_s),
        prompt_logprobs=PromptLogprobs(body, identity.vocab_size, piece_bytes) if wants_prompt else None,
    )


def sources_of(body: pb.OpenSession, wanted: frozenset[str] | None, drafters: Iterable[str]) -> str:
    """Names of all that propose for a session, of the draft and these drafters; `wanted` by its client, None: all."""
    names = [DRAFT_MODEL, *drafters]
    if not body.prediction_token_ids:
        names = [name for name in names if name != "prediction"]
    return " ".join(name for name in names if wanted is None or name in wanted)
