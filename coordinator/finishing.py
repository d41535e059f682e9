"""Choices and requests end by themselves, by their client, by another stream, or by a failure.

The first end counts; later ones do nothing.
"""

from __future__ import annotations

from specdec.coordinator.observer import Observer
from specdec.coordinator.sessions.session import Request, Session
from specdec.coordinator.sessions.table import SessionTable
from specdec.coordinator.sessions.tally import prediction_counts, total
from specdec.coordinator.text.choice_output import Finish
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Cancelled, SpecdecError


class Finisher:
    """Ends choices on target and draft, and sends the client the last chunks."""

    def __init__(self, sessions: SessionTable, observer: Observer) -> None:
        self._sessions = sessions
        self._observer = observer

    def finish(self, session: Session, finish: Finish, reason: str = "finished") -> None:
        """End a choice: target and draft close it, and the client gets the reason."""
        if not self._close(session, finish, reason):
            return
        request = session.request
        ended = api.ChoiceFinished(index=session.choice, reason=finish.reason, stats=session.tally.to_proto())
        if len(session.numerics_ids) > 1:
            ended.numerics_ids.extend(session.numerics_ids)
        if finish.stop_string is not None:
            ended.stop_string = finish.stop_string
        elif finish.stop_token_id is not None:
            ended.stop_token_id = finish.stop_token_id
        request.stream.push(api.GenerateResponse(choice_finished=ended))
        if request.num_unfinished == 0:
            request.stream.push(api.GenerateResponse(finished=_summary(request)))
            request.stream.close()

    def abort(self, request: Request) -> None:
        """End all choices of a request, which may still wait for a place; its stream ends without an error."""
        request.is_aborted = True
        request.end_wait()
        for session in request.sessions:
            held_text = (
                session.output.take_tokens((), Finish(pb.FINISH_REASON_ABORT)).text if session.finish is None else ""
            )
            if held_text:
                request.stream.output(session.choice, held_text, session.detokenizers)
            self.finish(session, Finish(pb.FINISH_REASON_ABORT), "aborted")

    def take_over(self, request: Request) -> None:
        """Another stream, here or at another coordinator, continues the request, which may still wait for a place."""
        request.end_wait()
        self.fail(request, Cancelled("the request was taken over by another stream", reason="TAKEN_OVER"))

    def fail(self, request: Request, error: SpecdecError) -> None:
        """End a request with an error; tokens that were committed before still reach the client."""
        self.drop(request, "failed")
        request.stream.close(error)

    def drop(self, request: Request, reason: str) -> None:
        """Close a request's sessions on target and draft, without telling the client."""
        for session in request.sessions:
            self._close(session, Finish(pb.FINISH_REASON_ABORT), reason)

    def _close(self, session: Session, finish: Finish, reason: str) -> bool:
        if session.finish is not None:
            return False
        session.finish = finish
        session.request.num_unfinished -= 1
        session.close(reason)
        self._sessions.remove(session)
        self._observer.session_ended(session)
        session.on_ended()
        return True


def _summary(request: Request) -> api.GenerateFinished:
    usage = api.Usage(
        prompt_tokens=request.sessions[0].num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        completion_tokens=sum(session.num_output_tokens for session in request.sessions),
    )
    stats = total(session.tally for session in request.sessions)
    if any(session.prediction for session in request.sessions):
        accepted, verified = prediction_counts(stats)
        usage.accepted_prediction_tokens, usage.rejected_prediction_tokens = accepted, verified - accepted
    return api.GenerateFinished(
        usage=usage,
        stats=stats,
        numerics_changed=any(len(session.numerics_ids) > 1 for session in request.sessions),
    )
