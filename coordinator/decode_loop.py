"""Read this first: what happens between a target's verdict and the client.

    open            a session starts on its target and its draft at once; both prefill
    on_proposal     draft   -> target    relayed without parsing, unless both have a direct link (`draft_relay.py`)
    on_prompt_logprobs
                    target  -> client    before the first verdict, if the client wants them
    on_verdict      target  -> client    the tokens that survive the stop check, as text
                            -> draft     the same tokens, as a commit, unless the target has sent them directly
    on_written      client  -> target    credit: how far it may run ahead of the client
    finish          both sides close; the client learns why

The target decodes on its own: it needs no message between two steps, and a proposal only makes it faster. So nothing
here waits, and nothing here can change a token: the client's tokens are the target's, cut at a stop string.
`finishing.py` ends choices; `recovery/` repairs failures on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from specdec.coordinator.draft_relay import DraftRelay
from specdec.coordinator.finishing import Finisher
from specdec.coordinator.journal import Journal
from specdec.coordinator.observer import Observer
from specdec.coordinator.sessions.client_stream import prompt_chunks
from specdec.coordinator.sessions.drafting import DraftSide
from specdec.coordinator.sessions.session import DraftHost, Session, TargetHost
from specdec.coordinator.sessions.step_told import step_told
from specdec.coordinator.sessions.table import SessionTable
from specdec.coordinator.sessions.verdict_check import fault_of
from specdec.coordinator.tasks import Work, in_parts
from specdec.coordinator.text.choice_output import Finish
from specdec.v1 import common_pb2 as pb

_CREDIT_STEPS = 4
"""Credit messages per window: a target is sent new credit long before it has used up the old."""


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
        drafts: DraftRelay,
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
            on_bad_draft: called, with the cause, when the target refuses a proposal; it does not name the draft.
            drafts: sends tokens to the drafts, and takes their proposals.
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
        self._drafts = drafts
        self._on_verified = on_verified

    def open_session(self, session: Session, target: TargetHost, draft: DraftHost | None) -> None:
        """Start a choice. Sessions opened in one turn leave in one frame, so that a fork finds its parent."""
        self._sessions.add(session)
        session.target.credit_position = session.num_written + self._credit_window
        session.drafting.is_coming = draft is not None
        works: list[Work] = [(session.position + len(session.prediction), partial(target.open_session, session))]
        if draft is not None:
            works.append((session.position, partial(self._open_at_draft, session, draft)))
        in_parts(works)

    def _open_at_draft(self, session: Session, draft: DraftHost) -> None:
        """Open a session at its first draft, in a later turn of the event loop if it is long."""
        if session.finish is None and draft.is_up and not session.drafting.sides:
            draft.open_session(session)
        session.drafting.is_coming = False

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
        step = session.output.take_tokens(token_ids, _finish_of(verdict))
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
            linked = verdict.linked if verdict.HasField("linked") else None
            suspend = verdict.suspends_draft
            self._drafts.commit(session, start, kept, now_s, is_plain=is_plain, suspend=suspend, linked=linked)
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
        self._drafts.on_proposal(session, side, proposal)

    def on_link(self, session: Session, side: DraftSide, state: pb.LinkState) -> None:
        """A draft of the session has joined it at the target, or has left it there."""
        self._drafts.on_link(session, side, state)

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
