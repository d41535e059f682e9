"""Read this first: what happens between a target's verdict and the client.

    open            a session starts on its target and its draft at once; both prefill
    on_proposal     draft   -> target    relayed unopened
    on_verdict      target  -> client    the tokens that survive the stop check, as text
                            -> draft     the same tokens, as a commit
    on_written      client  -> target    credit: how far it may run ahead of what the client took
    finish          both sides close; the client learns why

The target decodes on its own: it needs no message between two steps, and a proposal only makes it faster. So
nothing here waits, and nothing here can change a token: the client's tokens are the target's, cut at a stop
string. How choices end is in `finishing.py`; what goes wrong on the way is repaired in `recovery/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum, auto

from coordinator.finishing import Finisher
from coordinator.journal import Journal
from coordinator.observer import Observer
from coordinator.sessions.client_stream import add_tokens
from coordinator.sessions.session import DraftHost, Session, TargetHost
from coordinator.sessions.table import SessionTable
from coordinator.text.choice_output import Finish
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_CREDIT_STEPS = 4
"""The target hears of credit each time a quarter of its window was taken, long before it runs out of it."""

_MOST_DOUBLINGS = 6
"""Of the time that a draft gets, each time it let it pass."""

_MOST_PROPOSALS = 256
"""Between two commits: a draft proposes no further ahead than 64 tokens, and has a few things to say of each."""
_MOST_PROPOSED_BYTES = 4 * 2**20
"""Likewise; the largest proposal, of 64 distributions over 64 tokens, takes some 40 KB."""
_FLOOD = 4
"""So many times as much is no mistake."""


class DraftFault(Enum):
    """What a draft does wrong without a word."""

    STALL = auto()
    """It proposes nothing."""
    FLOOD = auto()
    """It proposes far too much."""


class DecodeLoop:
    """Moves sessions forward. Runs in the event loop's thread, called by the links' readers; never blocks."""

    def __init__(
        self,
        *,
        sessions: SessionTable,
        journal: Journal,
        observer: Observer,
        finisher: Finisher,
        credit_window_tokens: int,
        on_progress: Callable[[Session], None],
        on_desync: Callable[[Session, str], None],
        on_bad_draft: Callable[[Session, str], None],
        draft_stall_s: float,
        on_draft: Callable[[Session, DraftFault], None],
        on_verified: Callable[[Session, int], None],
    ) -> None:
        """Move nothing yet.

        Args:
            sessions: where sessions are kept from when they open.
            journal: is told of all tokens.
            observer: is told what happens.
            finisher: ends choices.
            credit_window_tokens: how far a target may run ahead of what its client took.
            on_progress: called when a session that was suspected of a target's end has got on.
            on_desync: called, with the cause, when a target is not where the client is.
            on_bad_draft: called, with the cause, when the target refuses what a draft proposed.
            draft_stall_s: how long a draft may be told of commits without a proposal.
            on_draft: called when it was, and when it proposes far more than anyone can verify.
            on_verified: called when a proposal was verified, with the number of tokens that were accepted.
        """
        self._sessions = sessions
        self._journal = journal
        self._observer = observer
        self._finisher = finisher
        self._credit_window = credit_window_tokens
        self._on_progress = on_progress
        self._on_desync = on_desync
        self._on_bad_draft = on_bad_draft
        self._draft_stall_s = draft_stall_s
        self._on_draft = on_draft
        self._on_verified = on_verified

    def open(self, session: Session, target: TargetHost, draft: DraftHost | None) -> None:
        """Start a choice. Sessions opened in one turn leave in one frame, so that a fork finds its parent."""
        self._sessions.add(session)
        session.target.credit_position = session.num_written + self._credit_window
        target.open(session)
        if draft is not None:
            draft.open(session)

    def on_verdict(self, session: Session, verdict: pb.Verdict) -> None:
        """A target step committed tokens. Cost: about 0.05 ms; the product's latency depends on it."""
        now_s = time.monotonic()
        num_known = session.position - verdict.start_position
        cause = _desync(session, verdict, num_known)
        if cause is not None:
            self._observer.mismatch()
            self._on_desync(session, cause)
            return
        token_ids = verdict.token_ids[num_known:]
        step = session.output.take(token_ids, _finish_of(verdict))
        kept = token_ids[: step.num_kept]
        origins = verdict.origins[num_known : num_known + step.num_kept]
        start = session.position
        previous_s = session.tally.previous_verdict_s
        is_first = previous_s is None
        session.token_ids.extend(kept)
        session.target.recovered(now_s)
        if session.target.cleared_at is not None and session.position >= session.target.cleared_at:
            self._on_progress(session)

        if step.finish is None and kept:
            self._commit(session, start, kept, now_s)
        if kept:
            self._journal.append(session, origins)
        if is_first:
            self._send_prompt_facts(session, verdict)
        if kept or step.text:
            delta = session.request.stream.delta(session.choice)
            delta.text += step.text
            add_tokens(delta, session.detokenizers, kept, origins, verdict.logprobs[num_known:])
        session.tally.add(verdict, len(kept), is_first, now_s)
        self._observer.verdict(session, verdict, len(kept), is_first, now_s)
        if kept:
            self._note_output(session, now_s)
            self._observer.tokens(origins, now_s, previous_s)
        if verdict.verified_by_depth and session.draft.host is not None:
            self._on_verified(session, verdict.num_accepted)
        if step.finish is not None:
            self._finisher.finish(session, step.finish)

    def on_proposal(self, session: Session, proposal: bytes) -> None:
        """A draft offers tokens: pass them on, unopened."""
        side = session.draft
        side.num_proposals += 1
        side.num_proposed_bytes += len(proposal)
        excess = max(side.num_proposals / _MOST_PROPOSALS, side.num_proposed_bytes / _MOST_PROPOSED_BYTES)
        if excess > 1:  # of no use to anybody: no target sees it
            if excess > _FLOOD:
                self._on_draft(session, DraftFault.FLOOD)
        elif session.target.host is not None:
            side.unanswered_s, side.num_stalls = None, 0
            self._observer.proposal(session, time.monotonic())
            session.target.host.relay(session, proposal)

    def on_proposal_rejected(self, session: Session, rejected: pb.ProposalRejected) -> None:
        """The draft offered something that is no proposal: go on without it."""
        self._on_bad_draft(session, rejected.status.message)

    def on_written(self, session: Session, num_tokens: int) -> None:
        """The client took tokens: let the target run on. Told in steps, not per token."""
        session.num_written += num_tokens
        side, credit = session.target, session.num_written + self._credit_window
        if credit - side.credit_position >= max(1, self._credit_window // _CREDIT_STEPS):
            if session.position >= side.credit_position:
                side.heard_s = time.monotonic()
            side.credit_position = credit
            if session.finish is None and side.host is not None:
                side.host.give_credit(session)

    def _commit(self, session: Session, start: int, token_ids: Sequence[int], now_s: float) -> None:
        draft = session.draft.host
        if draft is None:
            return
        if draft.identity is not None and session.position >= draft.identity.max_model_len:
            draft.close(session, "past the draft's context")
            return
        draft.commit(session, start, token_ids)
        self._observer.committed(session, now_s)
        side = session.draft
        side.committed()
        if side.unanswered_s is None:
            side.unanswered_s = now_s
        elif now_s - side.unanswered_s >= self._draft_stall_s * 2 ** min(side.num_stalls, _MOST_DOUBLINGS):
            self._on_draft(session, DraftFault.STALL)

    def _note_output(self, session: Session, now_s: float) -> None:
        request = session.request
        if not request.has_output:
            request.has_output = True
            request.trace.first_token()
            self._observer.first_token(request, now_s)

    def _send_prompt_facts(self, session: Session, verdict: pb.Verdict) -> None:
        if session.choice == 0:
            session.request.num_cached_tokens = verdict.num_cached_tokens
            if session.num_prompt_logprobs is not None and verdict.prompt_logprobs:
                facts = api.PromptLogprobs(
                    token_ids=session.token_ids[: session.num_prompt_tokens],
                    positions=verdict.prompt_logprobs,
                )
                session.request.stream.push(api.GenerateResponse(prompt_logprobs=facts))


def _desync(session: Session, verdict: pb.Verdict, num_known: int) -> str | None:
    """Why a verdict does not continue what was delivered, or None."""
    if num_known < 0:
        return f"verdict starts at {verdict.start_position}, expected {session.position}"
    if len(verdict.origins) != len(verdict.token_ids):
        return "verdict does not say where its tokens came from"
    if (
        num_known
        and list(verdict.token_ids[:num_known]) != session.token_ids[verdict.start_position :][: len(verdict.token_ids)]
    ):
        return f"verdict differs from what was delivered from {verdict.start_position} on"
    return None


def _finish_of(verdict: pb.Verdict) -> Finish | None:
    if verdict.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        return None
    stop_token_id = verdict.stop_token_id if verdict.HasField("stop_token_id") else None
    return Finish(verdict.finish_reason, stop_token_id=stop_token_id)
