"""Which target a session has, when targets break, refuse or come back. Without one it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from coordinator.decode_loop import DecodeLoop
from coordinator.links.replica_link import ReplicaLink
from coordinator.links.target_link import TargetLink
from coordinator.observer import Observer
from coordinator.replicas.fleet import Fleet, same_model
from coordinator.sessions.session import Session
from specdec.backoff import Backoff
from specdec.rpc.errors import SpecdecError, Unavailable

_log = structlog.get_logger(__name__)


class TargetRecovery:
    """Opens sessions again, on their target or another one."""

    def __init__(
        self,
        fleet: Fleet,
        decode_loop: DecodeLoop,
        observer: Observer,
        *,
        timeout_s: float,
        backoff: Backoff,
    ) -> None:
        """`timeout_s` is how long a session may go without a target; between two tries it waits for the back-off."""
        self._fleet = fleet
        self._decode_loop = decode_loop
        self._observer = observer
        self._timeout_s = timeout_s
        self._backoff = backoff
        self._give_ups: dict[str, asyncio.TimerHandle] = {}

    def forget(self, link: ReplicaLink) -> None:
        """A link is gone for good, or up: nobody gives it up any more."""
        if (timer := self._give_ups.pop(link.address, None)) is not None:
            timer.cancel()

    def went_down(self, link: TargetLink) -> None:
        """A target's stream ended: its sessions move, or wait until it is given up."""
        for session in list(link.sessions.values()):
            if (other := self._fleet.find_target(session.request.model, besides=link)) is not None:
                self._move_to(session, link, other)
        if link.sessions and link.address not in self._give_ups:
            loop = asyncio.get_running_loop()
            self._give_ups[link.address] = loop.call_later(self._timeout_s, self.give_up, link)

    def came_up(self, link: TargetLink, lost: Sequence[Session]) -> None:
        """A target's stream is ready: its sessions go on there, and so do those that wait for one like it."""
        self.forget(link)
        opened_again = {session.session_id for session in lost}
        for session in list(link.sessions.values()):
            if link.identity is not None and not same_model(session.request.model, link.identity):
                self._move(session, link)
            elif session.session_id in opened_again:
                self.reopen(session)
            else:
                link.give_credit(session)
        if link.is_draining or link.identity is None:
            return
        for other in self._fleet.targets:
            if other is not link and not other.is_up:
                for session in [s for s in other.sessions.values() if same_model(s.request.model, link.identity)]:
                    self._move_to(session, other, link)

    def give_up(self, link: TargetLink) -> None:
        """A target is gone for too long, or serves something else now."""
        self.forget(link)
        for session in list(link.sessions.values()):
            self._move(session, link)

    def _move(self, session: Session, link: TargetLink) -> None:
        if session.finish is not None:
            return
        link.sessions.pop(session.session_id, None)
        other = self._fleet.find_target(session.request.model, besides=link)
        if other is None:
            error = Unavailable(
                f"target {link.address} is gone and no other serves the model",
                retry_after_s=self._backoff.longest_s,
                reason="TARGET_LOST",
            )
            self._decode_loop.fail(session.request, error)
            return
        self._move_to(session, link, other)

    def _move_to(self, session: Session, link: TargetLink, other: TargetLink) -> None:
        if session.finish is not None:
            return
        link.release(session)
        _note_move(session, link, other)
        session.target = other
        self.reopen(session)
        self._follow_target(session)

    def retry(self, session: Session, error: SpecdecError) -> None:
        """Open a session again after a while, unless it has been failing for too long."""
        now_s = time.monotonic()
        if session.target_failing_s is None:
            session.target_failing_s = now_s
        session.num_target_failures += 1
        wait_s = self._backoff.wait_s(session.num_target_failures)
        if session.target is not None:
            session.target.supersede(session)
        if now_s + wait_s - session.target_failing_s > self._timeout_s:
            failure = Unavailable(
                f"the target keeps refusing the session: {error.message}",
                retry_after_s=wait_s,
                reason="TARGET_REFUSES",
            )
            self._decode_loop.fail(session.request, failure)
            return
        _cancel(session.target_retry)
        session.target_retry = asyncio.get_running_loop().call_later(wait_s, self.reopen, session)

    def reopen(self, session: Session) -> None:
        """Open a session again now, where new ones would be opened."""
        _cancel(session.target_retry)
        session.target_retry = None
        if session.finish is None and session.target is not None:
            self._leave_unfit_target(session, session.target)
            self._observer.metrics.session_reopens.labels("target").inc()
            session.target.open(session)

    def _leave_unfit_target(self, session: Session, link: TargetLink) -> None:
        """A session that has to be opened again is not opened where new ones would not be."""
        if link.is_ready or not link.is_up:
            return
        other = self._fleet.find_target(session.request.model, besides=link)
        if other is not None and other.is_ready:
            link.release(session)
            _note_move(session, link, other)
            session.target = other
            self._follow_target(session)

    def _follow_target(self, session: Session) -> None:
        """The draft goes by the load of the session's target, which it is told at opening."""
        if session.draft is not None and session.draft.is_up:
            self._observer.metrics.session_reopens.labels("draft").inc()
            session.draft.open(session)


def _note_move(session: Session, link: TargetLink, other: TargetLink) -> None:
    _log.info("session_moved", **session.log_fields, target=other.address)
    session.request.trace.event(
        "session_moved", choice=session.choice, source=link.address, target=other.address, position=session.position
    )


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
