"""Open sessions again, on their target or another one, when targets break, refuse or come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import structlog

from specdec.coordinator.finishing import Finisher
from specdec.coordinator.links.target_link import TargetLink
from specdec.coordinator.observer import Observer
from specdec.coordinator.recovery.quarantine import Quarantine
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.sessions.session import Session, TargetHost
from specdec.coordinator.sessions.table import SessionTable
from specdec.coordinator.tasks import Work, in_parts
from specdec.wire.backoff import Backoff
from specdec.wire.errors import SpecdecError, Unavailable

_log = structlog.get_logger(__name__)


class TargetMoves:
    """Assigns targets to sessions. A session without a target waits."""

    def __init__(
        self,
        *,
        sessions: SessionTable,
        fleet: Fleet,
        finisher: Finisher,
        observer: Observer,
        timeout_s: float,
        backoff: Backoff,
    ) -> None:
        """`timeout_s`: how long a session may be without a target. `backoff`: waits between two tries."""
        self._fleet = fleet
        self._finisher = finisher
        self._observer = observer
        self._timeout_s = timeout_s
        self._backoff = backoff
        self._give_ups: dict[str, asyncio.TimerHandle] = {}
        self.quarantine = Quarantine(sessions, self.reopen)
        """Holds the sessions that may have crashed a target, and decides how they are opened."""

    def forget(self, link: TargetLink) -> None:
        """A link was removed, or is up: cancel its time-out."""
        if (timer := self._give_ups.pop(link.address, None)) is not None:
            timer.cancel()

    def went_down(self, link: TargetLink) -> None:
        """A target's stream ended: its sessions move, or wait for it until its time-out."""
        now_s = time.monotonic()
        works: list[Work] = []
        for session in list(link.sessions.values()):
            if session.finish is not None:  # it ended with another choice of its request
                continue
            session.target.went_down(now_s)
            if session.target.has_gone_down_for(self._timeout_s, now_s):
                message = f"the request's targets keep breaking their streams; the last one was {link.address}"
                error = Unavailable(message, retry_after_s=self._backoff.longest_s, reason="TARGET_LOST")
                self._finisher.fail(session.request, error)
            else:
                works.append((session.position, partial(self._leave, session, link)))
        in_parts([*works, (0, partial(self._wait_for, link))])

    def _leave(self, session: Session, link: TargetLink) -> None:
        """Move a session from a target that is down, if there is another one."""
        is_there = link.sessions.get(session.session_id) is session and not link.is_up
        if is_there and (other := self._fleet.find_target(session.request, besides=link)) is not None:
            self._move_to(session, link, other)

    def _wait_for(self, link: TargetLink) -> None:
        """Give a target some time to come back to the sessions that have no other one."""
        if link.sessions and not link.is_up and link.address not in self._give_ups:
            loop = asyncio.get_running_loop()
            self._give_ups[link.address] = loop.call_later(self._timeout_s, self.give_up, link)

    def came_up(self, link: TargetLink, lost: Sequence[Session]) -> None:
        """A target's stream is ready: its sessions go on there, and sessions of targets that are down move to it."""
        self.forget(link)
        opened_again = {session.session_id for session in lost}
        works: list[Work] = []
        for session in list(link.sessions.values()):
            if link.identity is not None and not self._fleet.may_serve(link, session.request):
                works.append((session.position, partial(self._move, session, link)))
            elif session.session_id in opened_again:
                session.target.cancel_retry()
                link.hold(session)
                works.append((session.position, partial(self._take_up, session, link)))
            else:
                link.give_credit(session)
        if not link.is_draining and link.identity is not None:
            works += [
                (session.position, partial(self._follow, session, other, link))
                for other in self._fleet.targets
                if other is not link and not other.is_up
                for session in other.sessions.values()
                if self._fleet.may_serve(link, session.request)
            ]
        in_parts(works)

    def _take_up(self, session: Session, link: TargetLink) -> None:
        """Open a session that was held at a target since that came up."""
        if session.target.is_held and link.sessions.get(session.session_id) is session:
            self.reopen(session)

    def _follow(self, session: Session, link: TargetLink, other: TargetLink) -> None:
        """Move a session from a target that is down to one that came up."""
        if link.sessions.get(session.session_id) is session and other.is_up and not link.is_up:
            self._move_to(session, link, other)

    def give_up(self, link: TargetLink) -> None:
        """A target was gone for too long, or serves another model now."""
        self.forget(link)
        in_parts((session.position, partial(self._move, session, link)) for session in link.sessions.values())

    def _move(self, session: Session, link: TargetLink) -> None:
        """Move a session from a target that cannot serve it, or fail its request."""
        is_there = session.finish is None and link.sessions.get(session.session_id) is session
        if not is_there or (link.is_up and self._fleet.may_serve(link, session.request)):
            return
        link.sessions.pop(session.session_id, None)
        other = self._fleet.find_target(session.request, besides=link)
        if other is None:
            error = Unavailable(
                f"target {link.address} is gone, and no other target serves the model",
                retry_after_s=self._backoff.longest_s,
                reason="TARGET_LOST",
            )
            self._finisher.fail(session.request, error)
            return
        self._move_to(session, link, other)

    def _move_to(self, session: Session, link: TargetLink, other: TargetLink) -> None:
        if session.finish is not None:
            return
        self._hand_over(session, link, other)
        self.reopen(session)

    def retry(self, session: Session, error: SpecdecError) -> None:
        """Open a session again after a wait; fail its request if it has been failing for too long."""
        side, now_s = session.target, time.monotonic()
        if side.failing_s is None:
            side.failing_s = now_s
        side.num_failures += 1
        wait_s = self._backoff.wait_s(side.num_failures)
        side.supersede()
        if now_s + wait_s - side.failing_s > self._timeout_s:
            failure = Unavailable(
                f"the target keeps refusing the session: {error.message}",
                retry_after_s=wait_s,
                reason="TARGET_REFUSES",
            )
            self._finisher.fail(session.request, failure)
            return
        side.cancel_retry()
        side.retry = asyncio.get_running_loop().call_later(wait_s, self._reopen_anywhere, session)

    def reopen(self, session: Session) -> None:
        """Open a session again now, at a target that takes new sessions if there is one."""
        session.target.cancel_retry()
        if session.finish is not None or session.target.host is None:
            return
        target = self._fit_target(session, session.target.host)
        if not self.quarantine.may_open(session, target):
            return
        self._observer.session_reopened(target.role)
        target.open_session(session)
        for side in session.drafting.sides[:]:
            if side.may_be_ahead(session.position):  # its tokens may never arrive here
                self._observer.session_reopened(side.host.role)
                side.host.open_session(session)
            else:
                side.host.grant_link(session)

    def try_elsewhere(self, session: Session, error: SpecdecError) -> None:
        """Open a session now at another target that takes new sessions and has room; otherwise after a wait."""
        host = session.target.host
        other = None if host is None else self._fleet.find_target(session.request, besides=host, only_ready=True)
        if other is None or not self._fleet.has_room(other):
            self.retry(session, error)
            return
        self.move(session, other)

    def move(self, session: Session, other: TargetLink) -> None:
        """Move a session to another target."""
        if session.target.host is not None:
            session.target.cancel_retry()
            self._hand_over(session, session.target.host, other)
            self.reopen(session)

    def give_up_session(self, session: Session, error: SpecdecError) -> None:
        """Fail a session's request."""
        self._finisher.fail(session.request, error)

    def _reopen_anywhere(self, session: Session) -> None:
        """Open a session again, at another target if only that has room."""
        host = session.target.host
        other = None if host is None else self._fleet.find_target(session.request, besides=host, only_ready=True)
        own = next((link for link in self._fleet.targets if link is host), None)
        is_full = own is not None and not self._fleet.has_room(own)
        if is_full and other is not None and self._fleet.has_room(other):
            self.move(session, other)
        else:
            self.reopen(session)

    def _fit_target(self, session: Session, host: TargetHost) -> TargetHost:
        """The session's target if it takes new sessions or is down; otherwise another one that does, if any."""
        if host.is_ready or not host.is_up:
            return host
        other = self._fleet.find_target(session.request, besides=host, only_ready=True)
        if other is None:
            return host
        self._hand_over(session, host, other)
        return other

    def _hand_over(self, session: Session, host: TargetHost, other: TargetHost) -> None:
        """Assign another target to the session, which is still to be opened there."""
        host.release(session)
        _note_move(session, host, other)
        session.target.supersede()
        session.target.cleared_at = None
        session.target.host = other
        self.quarantine.settle(host.address)
        self._follow_target(session)

    def _follow_target(self, session: Session) -> None:
        """Open the session again at its drafts: the opening names the target, whose load bounds their drafting."""
        for side in session.drafting.sides[:]:
            if side.host.is_up:
                self._observer.session_reopened(side.host.role)
                side.host.open_session(session)


def _note_move(session: Session, link: TargetHost, other: TargetHost) -> None:
    _log.info("session_moved", **session.log_fields, target=other.address)
    session.request.trace.event(
        "session_moved", choice=session.choice, source=link.address, target=other.address, position=session.position
    )
