"""Read this first: what happens between a target's verdict and the client.

    open            a session starts on its target and its draft at once; both prefill
    on_proposal     draft   -> target    relayed unopened
    on_verdict      target  -> client    the tokens that survive the stop check, as text
                            -> draft     the same tokens, as a commit
    on_written      client  -> target    credit: how far it may run ahead of what the client took
    end             both sides close; the client learns why

The target decodes on its own: it needs no message between two steps, and a proposal only makes it faster. So
nothing here waits, and nothing here can change a token: the client's tokens are the target's, cut at a stop
string. What goes wrong on the way is repaired in `recovery.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from coordinator.journal import Journal
from coordinator.links.draft_link import DraftLink
from coordinator.links.target_link import TargetLink
from coordinator.observer import Observer
from coordinator.sessions.session import Request, Session, SessionTable
from coordinator.sessions.tally import total
from coordinator.text.choice_output import Finish
from coordinator.text.detokenizer import DetokenizerFactory
from specdec.rpc.errors import SpecdecError
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_CREDIT_STEPS = 4
_log = structlog.get_logger(__name__)


class DecodeLoop:
    """Moves sessions forward. Runs in the event loop's thread, called by the links' readers; never blocks."""

    def __init__(self, sessions: SessionTable, journal: Journal, observer: Observer, credit_window_tokens: int) -> None:
        self._sessions = sessions
        self._journal = journal
        self._observer = observer
        self._credit_window = credit_window_tokens
        self.on_desync: Callable[[Session, str], None] = lambda session, cause: None
        """Called when a target is not where the client is; set by `Recovery`."""
        self.on_bad_draft: Callable[[Session, str], None] = lambda session, cause: None
        """Called when the target refuses what a draft proposed; set by `Recovery`."""

    def open(self, session: Session, target: TargetLink, draft: DraftLink | None) -> None:
        """Start a choice. Sessions opened in one turn leave in one frame, so that a fork finds its parent."""
        self._sessions.add(session)
        session.credit_position = session.num_written + self._credit_window
        target.open(session)
        if draft is not None:
            draft.open(session)

    def on_verdict(self, session: Session, verdict: pb.Verdict) -> None:
        """A target step committed tokens. Cost: about 0.05 ms; the product's latency depends on it."""
        now_s = time.monotonic()
        num_known = session.position - verdict.start_position
        cause = _desync(session, verdict, num_known)
        if cause is not None:
            self._observer.metrics.mismatches.inc()
            self.on_desync(session, cause)
            return
        token_ids = verdict.token_ids[num_known:]
        step = session.output.take(token_ids, _finish_of(verdict))
        kept = token_ids[: step.num_kept]
        origins = verdict.origins[num_known : num_known + step.num_kept]
        start = session.position
        is_first, session.had_verdict = not session.had_verdict, True
        previous_s = session.tally.last_verdict_s if session.tally.first_verdict_s is not None else None
        session.token_ids.extend(kept)
        session.target_failing_s = None
        session.num_target_failures = 0

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
            self._observer.tokens(session, origins, now_s, previous_s)
        if step.finish is not None:
            self.end(session, step.finish)

    def on_proposal(self, session: Session, proposal: bytes) -> None:
        """A draft offers tokens: pass them on, unopened."""
        if session.target is not None:
            self._observer.proposal(session, time.monotonic())
            session.target.relay(session, proposal)

    def on_proposal_rejected(self, session: Session, rejected: pb.ProposalRejected) -> None:
        """The draft offered something that is no proposal: go on without it."""
        self.on_bad_draft(session, rejected.status.message)

    def on_written(self, session: Session, num_tokens: int) -> None:
        """The client took tokens: let the target run on. Told in steps, not per token."""
        session.num_written += num_tokens
        credit = session.num_written + self._credit_window
        if credit - session.credit_position >= max(1, self._credit_window // _CREDIT_STEPS):
            session.credit_position = credit
            if session.finish is None and session.target is not None:
                session.target.give_credit(session)

    def end(self, session: Session, finish: Finish, reason: str = "finished") -> None:
        """End a choice: both sides close, and the client learns why."""
        if not self._close(session, finish, reason):
            return
        request = session.request
        ended = api.ChoiceFinished(index=session.choice, reason=finish.reason, stats=session.tally.to_proto())
        if finish.stop_string is not None:
            ended.stop_string = finish.stop_string
        elif finish.stop_token_id is not None:
            ended.stop_token_id = finish.stop_token_id
        request.stream.push(api.GenerateResponse(choice_finished=ended))
        if request.num_unfinished == 0:
            request.stream.push(api.GenerateResponse(finished=_summary(request)))
            request.stream.close()

    def abort(self, request: Request) -> None:
        """End all choices of a request; its stream ends in order."""
        for session in request.sessions:
            held_text = session.output.take((), Finish(pb.FINISH_REASON_ABORT)).text if session.finish is None else ""
            if held_text:
                request.stream.delta(session.choice).text += held_text
            self.end(session, Finish(pb.FINISH_REASON_ABORT), "aborted")

    def fail(self, request: Request, error: SpecdecError) -> None:
        """End a request with an error; what was decided before still reaches the client."""
        self.drop(request, "failed")
        request.stream.close(error)

    def drop(self, request: Request, reason: str) -> None:
        """Free what a request holds on both sides, without telling the client."""
        for session in request.sessions:
            self._close(session, Finish(pb.FINISH_REASON_ABORT), reason)

    def _commit(self, session: Session, start: int, token_ids: Sequence[int], now_s: float) -> None:
        draft = session.draft
        if draft is None:
            return
        if draft.identity is not None and session.position >= draft.identity.max_model_len:
            draft.close(session, "past the draft's context")
            return
        draft.commit(session, start, token_ids)
        if session.committed_s is None:
            session.committed_s = now_s

    def _send_prompt_facts(self, session: Session, verdict: pb.Verdict) -> None:
        if session.choice == 0:
            session.request.num_cached_tokens = verdict.num_cached_tokens
            if session.num_prompt_logprobs is not None and verdict.prompt_logprobs:
                facts = api.PromptLogprobs(
                    token_ids=session.token_ids[: session.num_prompt_tokens],
                    positions=verdict.prompt_logprobs,
                )
                session.request.stream.push(api.GenerateResponse(prompt_logprobs=facts))

    def _close(self, session: Session, finish: Finish, reason: str) -> bool:
        if session.finish is not None:
            return False
        session.finish = finish
        session.request.num_unfinished -= 1
        for timer in (session.target_retry, session.draft_retry):
            if timer is not None:
                timer.cancel()
        if session.draft is not None:
            session.draft.close(session, reason)
        if session.target is not None:
            session.target.close(session, reason)
        self._sessions.remove(session)
        self._observer.session_ended(session)
        return True


def add_tokens(
    delta: api.ChoiceDelta,
    detokenizers: DetokenizerFactory,
    token_ids: Sequence[int],
    origins: Sequence[pb.Origin.ValueType],
    logprobs: Sequence[pb.PositionLogprobs] = (),
) -> None:
    """Add tokens as clients see them."""
    text, add = detokenizers.token_text, delta.tokens.add
    if logprobs:
        for token_id, origin, position in zip(token_ids, origins, logprobs, strict=False):
            add(id=token_id, text=text(token_id), origin=origin, logprobs=position)
    else:
        for token_id, origin in zip(token_ids, origins, strict=True):
            add(id=token_id, text=text(token_id), origin=origin)


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


def _summary(request: Request) -> api.GenerateFinished:
    usage = api.Usage(
        prompt_tokens=request.sessions[0].num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        completion_tokens=sum(s.position - s.num_prompt_tokens for s in request.sessions),
    )
    return api.GenerateFinished(usage=usage, stats=total(s.tally for s in request.sessions))
