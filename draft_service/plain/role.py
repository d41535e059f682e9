"""A draft's role without an engine: after each commit its drafters are asked, and what they offer is sent as one tree.

Nothing is computed ahead of commits but what an endpoint streams. Nothing that drafters do can change a coupled
session's output; in rejection mode their tokens are point masses, which are functions of the past (docs/rejection.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import structlog
from google.rpc import code_pb2

from specdec.config import DraftSettings
from specdec.draft_service.plain.proposals import Named, main_chain, make_proposal, merged, named
from specdec.draft_service.plain.recorder import PlainRecorder
from specdec.draft_service.plain.session import Part, PlainSession, new_session
from specdec.drafting.endpoints.drafter import ApiSession, OpenAiApi
from specdec.drafting.interface import Drafter, Room
from specdec.replica.worker.errors import SessionFailure, invalid
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.opening import check_room
from specdec.replica.worker.sessions import Owner
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import VerifyMode

_POLL_S = 0.004
"""How often it is looked whether an endpoint has said something."""
_log = structlog.get_logger("specdec.draft")


class PlainDrafting:
    """Follows commits and proposes what its drafters offer."""

    def __init__(
        self,
        host: SessionHost[PlainSession],
        drafters: Sequence[Drafter],
        identity: pb.ModelIdentity,
        settings: DraftSettings,
        recorder: PlainRecorder,
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

    def open(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> PlainSession:
        """Check and admit a session."""
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

    def position(self, session: PlainSession) -> int:
        """Number of committed tokens."""
        return session.num_committed

    def entry(self, session: PlainSession, kind: str, body: Any) -> None:
        """A commit."""
        if kind != "commit":
            return
        session.is_suspended = body.suspend
        self._commit(session, body.start_position, list(body.token_ids))
        if session.is_suspended:
            self._quieten(session)

    def owner_message(self, owner: Owner, message: Any) -> None:
        """How far to draft does not depend on load: an offer costs next to nothing."""

    def close(self, session: PlainSession) -> None:
        """End the drafters' parts."""
        for part in session.parts:
            try:
                part.drafter.close(session.context)
            except Exception as error:
                self._drop(part.name, error)
        session.parts.clear()
        self._recorder.closed()

    def update_pause(self, session: PlainSession) -> None:
        """Nobody hears proposals of a session whose owner cannot be told."""
        if session.may_step:
            session.is_due = True
        else:
            self._quieten(session)

    def resend(self, session: PlainSession, seen: pb.AttachedSession) -> None:
        """Propose again: whether the last proposal arrived is not known."""
        if seen.committed_length != session.num_committed:
            message = f"commits up to {seen.committed_length} were lost"
            code, position = code_pb2.OUT_OF_RANGE, session.num_committed
            raise SessionFailure(code, "COMMIT_GAP", message, expected_position=position)
        session.told, session.is_due = (0, 0, False), True

    def absorb_proposals(self, now_s: float) -> None:
        """See whom an endpoint has told something."""
        for session in self._host.sessions:
            if not session.is_due and any(api.has_news for api in _apis(session)):
                session.is_due = True

    def wait_s(self, now_s: float) -> float | None:
        """0 while somebody is due; a few milliseconds while an endpoint may speak."""
        able = [session for session in self._host.sessions if _may_propose(session)]
        if any(session.is_due for session in able):
            return 0
        return _POLL_S if any(api.is_waiting for session in able for api in _apis(session)) else None

    def step(self) -> None:
        """Ask the drafters of all sessions that are due, and send what they offer."""
        for session in list(self._host.sessions):
            if session.is_due and _may_propose(session):
                session.is_due = False
                self._host.steps.work_on([session.key])
                self._propose(session)

    def load(self) -> pb.LoadReport:
        """How many sessions there are; exports the gauges too."""
        num_sessions = len(self._host.sessions)
        self._recorder.load(num_sessions, self._ledger)
        return pb.LoadReport(
            num_running=num_sessions,
            num_sessions=num_sessions,
            max_sessions=self._settings.max_sessions,
            num_waiting_tokens=0,
        )

    def _commit(self, session: PlainSession, start: int, token_ids: list[int]) -> None:
        committed = session.num_committed
        if any(token >= self._identity.vocab_size for token in token_ids):
            raise invalid("commit.token_ids", "a token id is outside the vocabulary", expected_position=committed)
        overlap = min(committed - start, len(token_ids))
        if start > committed or session.token_ids[start : start + overlap] != token_ids[:overlap]:
            self._recorder.mismatch()
            is_gap = start > committed
            code = code_pb2.OUT_OF_RANGE if is_gap else code_pb2.FAILED_PRECONDITION
            reason = "COMMIT_GAP" if is_gap else "COMMIT_MISMATCH"
            message = f"commit: {start} does not continue {committed} committed tokens"
            raise SessionFailure(code, reason, message, field="commit", expected_position=committed)
        session.token_ids.extend(token_ids[overlap:])
        session.committed_at_s = time.monotonic()
        session.is_due = True

    def _propose(self, session: PlainSession) -> None:
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

    def _quieten(self, session: PlainSession) -> None:
        """What costs money is asked nothing while nobody listens."""
        for api in _apis(session):
            api.close(session.context)

    def _drop(self, name: str, error: Exception) -> None:
        """A drafter that failed is not asked any more, for nobody, until the service is started again."""
        self._host.faults.note(error)
        _log.error("drafter_dropped", drafter=name, error=type(error).__name__)
        self._recorder.dropped(name)
        self._drafters = [drafter for drafter in self._drafters if drafter.name != name]
        for session in self._host.sessions:
            session.parts = [part for part in session.parts if part.name != name]


def _may_propose(session: PlainSession) -> bool:
    return session.may_step and not session.is_suspended and session.max_depth > 0


def _apis(session: PlainSession) -> list[ApiSession]:
    return [part.drafter for part in session.parts if isinstance(part.drafter, ApiSession)]
