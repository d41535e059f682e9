"""Read this first: what happens between a target's verdict and the client.

    open            a session starts on its target and its draft at once; both prefill
    on_proposal     draft   -> target    relayed without parsing
    on_prompt_logprobs
                    target  -> client    before the first verdict, if the client wants them
    on_verdict      target  -> client    the tokens that survive the stop check, as text
                            -> draft     the same tokens, as a commit
    on_written      client  -> target    credit: how far it may run ahead of the client
    finish          both sides close; the client learns why

The target decodes on its own: it needs no message between two steps, and a proposal only makes it faster. So nothing
here waits, and nothing here can change a token: the client's tokens are the target's, cut at a stop string.
`finishing.py` ends choices; `recovery/` repairs failures on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specdec.coordinator.finishing import Finisher
from specdec.coordinator.journal import Journal
from specdec.coordinator.observer import Observer
from specdec.coordinator.sessions.client_stream import prompt_chunks
from specdec.coordinator.sessions.drafting import DraftFault, DraftSide
from specdec.coordinator.sessions.session import DraftHost, Session, TargetHost
from specdec.coordinator.sessions.step_told import step_told
from specdec.coordinator.sessions.table import SessionTable
from specdec.coordinator.sessions.verdict_check import fault_of
from specdec.coordinator.text.choice_output import Finish
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import MAX_PROPOSAL_BYTES

_CREDIT_STEPS = 4
"""Credit messages per window: a target is sent new credit long before it has used up the old."""

_MOST_DOUBLINGS = 6
"""Doublings, at most, of a draft's stall time-out: each missed time-out doubles it."""

_MOST_PROPOSALS = 256
"""Proposals of a draft between two commits: it drafts at most 64 tokens ahead, with a few messages for each."""
_MOST_PROPOSED_BYTES = 4 * 2**20
"""Bytes of a draft's proposals between two commits; the largest (64 distributions over 64 tokens) has 40 KB."""
_FLOOD = 4
"""Multiple of these limits above which the draft is taken for faulty."""


class DecodeLoop:
    """Moves sessions forward. The links' readers call it in the event loop's thread; it never blocks."""

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
        on_bad_draft: Callable[[Session, str, DraftHost | None], None],
        draft_stall_s: float,
        on_draft: Callable[[Session, DraftSide, DraftFault], None],
        on_hedged: Callable[[Session], None],
        on_verified: Callable[[Session, int], None],
    ) -> None:
        """Move nothing yet.

        Args:
            sessions: the table of open sessions.
            journal: records all tokens.
            observer: counts and logs events.
            finisher: ends choices.
            credit_window_tokens: how far a target may run ahead of its client.
            on_progress: called when a session that was suspected of a target's crash has passed the crash's position.
            on_desync: called, with the cause, when a target's position differs from the client's.
            on_bad_draft: called, with the cause, when a proposal is refused; the host is None if the target refused
                it, as the target does not name the draft.
            draft_stall_s: how long a draft may receive commits without sending a proposal that knows of them.
            on_draft: called when a draft stalls, is slow, or proposes far more than anyone can verify.
            on_hedged: called after each step of a session that has two drafts.
            on_verified: called when a proposal was verified, with the number of accepted tokens.
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
        self._on_hedged = on_hedged
        self._on_verified = on_verified

    def open(self, session: Session, target: TargetHost, draft: DraftHost | None) -> None:
        """Start a choice. Sessions opened in one turn leave in one frame, so that a fork finds its parent."""
        self._sessions.add(session)
        session.target.credit_position = session.num_written + self._credit_window
        session.drafting.is_coming = draft is not None
        target.open(session)
        if draft is not None:
            draft.open(session)

    def on_verdict(self, session: Session, verdict: pb.Verdict) -> None:
        """A target step committed tokens. Cost: about 0.05 ms; the product's latency depends on it."""
        now_s = time.monotonic()
        cause = fault_of(session, verdict)
        if cause is None and session.target.prompt is not None and not session.target.prompt.is_complete:
            cause = self._take_prompt(session, verdict, now_s)
        if cause is not None:
            self._observer.mismatch()
            self._on_desync(session, cause)
            return
        num_known = session.position - verdict.start_position
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
            is_plain = not (verdict.verified_by_depth or verdict.is_partial)
            self._commit(session, start, kept, now_s, is_plain=is_plain, suspend=verdict.suspends_draft)
        if kept:
            self._journal.append(session, origins)
        if is_first and session.choice == 0 and verdict.num_cached_tokens:
            session.request.num_cached_tokens = verdict.num_cached_tokens
        if kept or step.text:
            logprobs = verdict.logprobs[num_known:]
            told = None if verdict.is_partial else step_told(session, verdict, len(kept), now_s)
            names = _drafters_of(verdict)[num_known:]
            session.request.stream.output(
                session.choice, step.text, session.detokenizers, kept, origins, logprobs, told, names
            )
        if verdict.is_partial:
            session.tally.num_partial_tokens += len(kept)
        else:
            num_kept = len(kept) + session.tally.num_partial_tokens
            session.tally.num_partial_tokens = 0
            session.tally.add(verdict, num_kept, is_first, now_s)
            self._observer.verdict(session, verdict, num_kept, is_first, now_s)
        if kept:
            self._note_output(session, now_s)
            self._observer.tokens(origins, now_s, previous_s)
        # No draft proposes forced tokens: a step that accepted only these does not judge a draft.
        num_drafted = verdict.num_accepted - list(verdict.origins).count(pb.ORIGIN_FORCED)
        if verdict.verified_by_depth and session.drafting.sides and (num_drafted > 0 or not verdict.num_accepted):
            self._on_verified(session, max(0, num_drafted))
        if step.finish is not None:
            self._finisher.finish(session, step.finish)

    def on_prompt_logprobs(self, session: Session, part: pb.PromptLogprobsPart) -> None:
        """A target computed log-probabilities of the prompt. New credit acknowledges them."""
        cause = self._on_prompt(session, part.start_position, part.positions, time.monotonic())
        if cause is not None:
            self._observer.mismatch()
            self._on_desync(session, cause)
        elif session.target.host is not None:
            session.target.host.give_credit(session)

    def on_proposal(self, session: Session, side: DraftSide, proposal: bytes) -> None:
        """A draft of the session offers tokens: pass them on without parsing."""
        side.num_proposals += 1
        side.num_proposed_bytes += len(proposal)
        excess = max(side.num_proposals / _MOST_PROPOSALS, side.num_proposed_bytes / _MOST_PROPOSED_BYTES)
        if len(proposal) > MAX_PROPOSAL_BYTES:
            cause = f"proposal: {len(proposal)} bytes exceed the limit of {MAX_PROPOSAL_BYTES}"
            self._on_bad_draft(session, cause, side.host)
            return
        if excess > 1:  # a target could not use it
            if excess > _FLOOD:
                self._on_draft(session, side, DraftFault.FLOOD)
        elif session.target.host is not None:
            session.drafting.num_stalls, now_s = 0, time.monotonic()
            self._observer.proposal(session, now_s, side.proposed(proposal, now_s))
            session.target.host.relay(session, proposal)

    def on_proposal_rejected(self, session: Session, rejected: pb.ProposalRejected) -> None:
        """The target refused a draft's proposal as malformed: go on without it."""
        self._on_bad_draft(session, rejected.status.message, None)

    def on_written(self, session: Session, num_tokens: int) -> None:
        """The client took tokens: give the target credit, in quarters of the window."""
        session.num_written += num_tokens
        side, credit = session.target, session.num_written + self._credit_window
        if credit - side.credit_position >= max(1, self._credit_window // _CREDIT_STEPS):
            if session.position >= side.credit_position:
                side.heard_s = time.monotonic()
            side.credit_position = credit
            if session.finish is None and side.host is not None:
                side.host.give_credit(session)

    def on_prompt_written(self, session: Session, position: int) -> None:
        """The client took the prompt's log-probabilities below a position: let the target compute more of them."""
        side = session.target
        if side.prompt is None:
            return
        was_starved = side.prompt.is_starved
        if side.prompt.wrote(position) and session.finish is None and side.host is not None:
            if was_starved:
                side.heard_s = time.monotonic()
            side.host.give_credit(session)

    def _commit(
        self,
        session: Session,
        start: int,
        token_ids: Sequence[int],
        now_s: float,
        *,
        is_plain: bool,
        suspend: bool,
    ) -> None:
        """Commit tokens to the drafts. A suspended draft gets all at once when it resumes."""
        drafting = session.drafting
        for side in tuple(drafting.sides):
            draft = side.host
            if draft.identity is not None and session.position >= draft.identity.max_model_len:
                draft.close(session, "past the draft's context")
                continue
            if side.is_suspended and suspend:
                continue
            unknown = token_ids if side.told == start else session.token_ids[side.told :]
            draft.commit(session, side.epoch, session.position - len(unknown), unknown, suspend=suspend)
            side.told = session.position
            if suspend:
                side.suspended()
                continue
            side.is_suspended = False
            waited_s = side.committed(session.position, now_s, is_plain=is_plain)
            if waited_s is None:
                continue
            if waited_s >= self._draft_stall_s * 2 ** min(drafting.num_stalls, _MOST_DOUBLINGS):
                self._on_draft(session, side, DraftFault.STALL)
            elif drafting.is_slow(side):
                self._on_draft(session, side, DraftFault.SLOW)
        if len(drafting.sides) > 1:
            self._on_hedged(session)

    def _note_output(self, session: Session, now_s: float) -> None:
        request = session.request
        if not request.has_output:
            request.has_output = True
            request.trace.first_token()
            self._observer.first_token(request, now_s)

    def _take_prompt(self, session: Session, verdict: pb.Verdict, now_s: float) -> str | None:
        """Older targets send the prompt's log-probabilities with the first verdict; why they are missing, or None."""
        if verdict.prompt_logprobs:
            cause = self._on_prompt(session, 1, verdict.prompt_logprobs, now_s)
            if cause is not None:
                return cause
        prompt = session.target.prompt
        is_complete = prompt is None or prompt.is_complete
        return None if is_complete else "a verdict came before all log-probabilities of the prompt"

    def _on_prompt(
        self, session: Session, start: int, positions: Sequence[pb.PositionLogprobs], now_s: float
    ) -> str | None:
        """Pass on new log-probabilities of the prompt; returns why they are not the expected ones, or None."""
        prompt = session.target.prompt
        if prompt is None:
            return None  # nobody asked for them
        cause = prompt.fault_of(start, positions)
        if cause is not None:
            return cause
        num_arrived = prompt.arrived
        due = prompt.take(start, positions)
        if prompt.arrived > num_arrived:
            session.target.recovered(now_s)
        if due:
            first = prompt.arrived - len(due)
            for chunk in prompt_chunks(session.token_ids, first, due, is_joined=prompt.is_joined):
                session.request.stream.push(chunk)
        return None


def _finish_of(verdict: pb.Verdict) -> Finish | None:
    if verdict.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        return None
    stop_token_id = verdict.stop_token_id if verdict.HasField("stop_token_id") else None
    return Finish(verdict.finish_reason, stop_token_id=stop_token_id)


def _drafters_of(verdict: pb.Verdict) -> list[str]:
    """Name of the drafter of each token, "" for other origins; empty if the target reports no names."""
    if not verdict.accepted_by:
        return []
    names = iter(verdict.accepted_by)
    return [next(names, "") if origin == pb.ORIGIN_DRAFT else "" for origin in verdict.origins]
