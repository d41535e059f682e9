"""A draft's role without a model: after each commit it asks its drafters and sends their offers as one tree.

Only endpoints stream ahead of commits. Drafters cannot change a coupled session's output. In rejection mode their
tokens are point masses that depend on the past only (docs/rejection.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import structlog

from specdec.config import DraftSettings
from specdec.draft_service.modelless.metrics import ModellessRecorder
from specdec.draft_service.modelless.proposals import Named, main_chain, make_proposal, merged, named
from specdec.draft_service.modelless.session import ModellessSession, Part, new_session
from specdec.drafting.endpoints.drafter import EndpointSession, OpenAiApi
from specdec.drafting.interface import Drafter, Room
from specdec.drafting.role.commits import CommitConflict, check_no_commit_is_lost, num_known
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.opening import check_room
from specdec.replica.worker.role import DuringPass, Role
from specdec.replica.worker.sessions import Owner
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import VerifyMode

_POLL_S = 0.004
"""Seconds between two looks at the endpoints' streams."""
_log = structlog.get_logger("specdec.draft")


class ModellessDrafting(Role[ModellessSession]):
    """Follows commits and proposes what its drafters offer."""

    def __init__(
        self,
        host: SessionHost[ModellessSession],
        drafters: Sequence[Drafter],
        identity: pb.ModelIdentity,
        settings: DraftSettings,
        recorder: ModellessRecorder,
    ) -> None:
        self._host = host
        self._drafters = list(drafters)
        self._identity = identity
        self._settings = settings
        self._recorder = recorder
        apis = [drafter for drafter in drafters if isinstance(drafter, OpenAiApi)]
        self._ledger = apis[0].ledger if apis else None
        for api in apis:
            api.on_fault = recorder.api_fault
        recorder.serves(identity)

    def open_session(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> ModellessSession:
        """Check and admit a session. Raises SessionFailure, which names the field."""
        check_room(len(self._host.sessions), self._settings.max_sessions)
        session = new_session(owner, session_id, epoch, body, self._identity, self._settings)
        for drafter in list(self._drafters):
            try:
                part = drafter.open(session.context)
            except Exception as error:
                self._drop(drafter.name, error)
                continue
            if part is not None:
                session.parts.append(Part(drafter.name, part))
        self._recorder.opened()
        return session

    def position(self, session: ModellessSession) -> int:
        """Number of committed tokens."""
        return session.num_committed

    def entry(self, session: ModellessSession, kind: str, body: Any) -> None:
        """Take a commit. Raises SessionFailure if it leaves a gap or contradicts an earlier one."""
        if kind != "commit":
            return
        if body.start_position + len(body.token_ids) >= session.num_committed:  # not overtaken on another way
            session.is_suspended = body.suspend
        self._commit(session, body.start_position, list(body.token_ids))
        if session.is_suspended:
            self._quieten(session)

    def owner_message(self, owner: Owner, message: Any) -> None:
        """Ignored: an offer costs almost nothing, so depth does not depend on load."""

    def close_session(self, session: ModellessSession) -> None:
        """End the drafters' parts."""
        for part in session.parts:
            try:
                part.drafter.close(session.context)
            except Exception as error:
                self._drop(part.name, error)
        session.parts.clear()
        self._recorder.closed()

    def update_pause(self, session: ModellessSession) -> None:
        """Stop endpoint calls while the session's owner cannot be reached; propose again afterwards."""
        if session.may_step:
            session.is_due = True
        else:
            self._quieten(session)

    def resend(self, session: ModellessSession, seen: pb.AttachedSession) -> None:
        """Propose again: the last proposal may be lost. Raises SessionFailure if commits were lost."""
        check_no_commit_is_lost(session.num_committed, seen)
        session.told, session.is_due = (0, 0, False), True

    def absorb_proposals(self, now_s: float) -> None:
        """Mark sessions for which an endpoint has sent text."""
        for session in self._host.sessions:
            if not session.is_due and any(api.has_news for api in _apis(session)):
                session.is_due = True

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next step: 0 while a session is due, `_POLL_S` while an endpoint streams, else None."""
        able = [session for session in self._host.sessions if _may_propose(session)]
        if any(session.is_due for session in able):
            return 0
        return _POLL_S if any(api.is_waiting for session in able for api in _apis(session)) else None

    def step(self, during: DuringPass | None = None, /) -> None:
        """Ask the drafters of all due sessions and send their offers."""
        for session in list(self._host.sessions):
            if session.is_due and _may_propose(session):
                session.is_due = False
                self._host.steps.work_on([session.key])
                self._propose(session)

    def load(self) -> pb.LoadReport:
        """The number of sessions. Also exports the gauges."""
        num_sessions = len(self._host.sessions)
        self._recorder.load(num_sessions, self._ledger)
        return pb.LoadReport(
            num_running=num_sessions,
            num_sessions=num_sessions,
            max_sessions=self._settings.max_sessions,
            num_waiting_tokens=0,
        )

    def _commit(self, session: ModellessSession, start: int, token_ids: list[int]) -> None:
        try:
            overlap = num_known(session.token_ids, session.num_committed, start, token_ids, self._identity.vocab_size)
        except CommitConflict:
            self._recorder.mismatch()
            raise
        session.token_ids.extend(token_ids[overlap:])
        session.committed_at_s = time.monotonic()
        session.is_due = True

    def _propose(self, session: ModellessSession) -> None:
        depth = min(session.max_depth, session.most_tokens - session.num_committed)
        room = Room(self._settings.max_proposal_nodes, depth)
        offers: list[Named] = []
        for part in list(session.parts) if depth > 0 else []:
            try:
                offer = part.drafter.propose(session.context, room)
            except Exception as error:
                session.parts.remove(part)
                self._drop(part.name, error)
                continue
            if offer is not None:
                offers.append(named(offer, part.name))
                self._recorder.offered(part.name, len(offer.token_ids))
        is_chain = session.mode is VerifyMode.REJECTION
        if is_chain:
            offers = [named(main_chain(each.offer), each.drafters[0]) for each in offers[:1]]
        found = merged(offers, room)
        is_complete = not any(api.is_waiting for api in _apis(session))
        told = session.num_committed, 0 if found is None else len(found.drafters), is_complete
        if told == session.told:
            return
        waited_s = None if session.committed_at_s is None else time.monotonic() - session.committed_at_s
        session.told, session.committed_at_s = told, None
        proposal = make_proposal(session.num_committed, found, is_chain=is_chain, is_complete=is_complete)
        self._recorder.proposal(told[1], waited_s)
        self._host.emit(session, proposal=proposal.SerializeToString())

    def _quieten(self, session: ModellessSession) -> None:
        """Close paid streams that cannot be used now."""
        for api in _apis(session):
            api.close(session.context)

    def _drop(self, name: str, error: Exception) -> None:
        """Drop a failed drafter from all sessions until the service restarts."""
        self._host.faults.note(error)
        _log.error("drafter_dropped", drafter=name, error=type(error).__name__)
        self._recorder.dropped(name)
        self._drafters = [drafter for drafter in self._drafters if drafter.name != name]
        for session in self._host.sessions:
            session.parts = [part for part in session.parts if part.name != name]


def _may_propose(session: ModellessSession) -> bool:
    return session.may_step and not session.is_suspended and session.max_depth > 0


def _apis(session: ModellessSession) -> list[EndpointSession]:
    return [part.drafter for part in session.parts if isinstance(part.drafter, EndpointSession)]
