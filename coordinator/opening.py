"""The choices of a request are opened at a target and a draft: as many as have places, the others as places come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from specdec.coordinator.decode_loop import DecodeLoop
from specdec.coordinator.finishing import Finisher
from specdec.coordinator.intake.admission import Place
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.sessions.session import Request, Session
from specdec.coordinator.tasks import let_others_run
from specdec.wire.errors import SpecdecError, internal_error


class Opener:
    """Picks replicas for choices and opens them there."""

    def __init__(self, fleet: Fleet, decode_loop: DecodeLoop, finisher: Finisher, target_timeout_s: float) -> None:
        """`target_timeout_s`: longest wait for a target."""
        self._fleet = fleet
        self._decode_loop = decode_loop
        self._finisher = finisher
        self._target_timeout_s = target_timeout_s

    @asynccontextmanager
    async def opened(self, request: Request, sessions: Sequence[Session], place: Place) -> AsyncIterator[None]:
        """Open those sessions that have places, and the others one by one while the block runs.

        Raises SpecdecError: there is no target for the first ones. A later failure ends the request.
        """
        if not sessions:
            yield
            return
        free = asyncio.Semaphore(0)
        place.on_more = free.release
        place.want_only(len(sessions))
        num_first = place.num_held
        await self._open_first(request, sessions[:num_first], place)
        opening = asyncio.create_task(self._open_rest(request, sessions[num_first:], place, free))
        try:
            yield
        finally:
            opening.cancel()

    async def _open_first(self, request: Request, sessions: Sequence[Session], place: Place) -> None:
        request.waiting = opening = asyncio.create_task(self._open(request, sessions, place))
        try:
            await opening
        except asyncio.CancelledError:
            if request.num_unfinished:  # the client left; else the request was ended, and its stream says why
                raise
        finally:
            request.waiting = None

    async def _open_rest(
        self, request: Request, sessions: Sequence[Session], place: Place, free: asyncio.Semaphore
    ) -> None:
        for session in sessions:
            await free.acquire()
            if session.finish is not None:
                place.end_one()
                continue
            try:
                await self._open(request, [session], place)
            except Exception as error:  # the stream would wait for the other choices for ever
                self._finisher.fail(request, error if isinstance(error, SpecdecError) else internal_error(error))
                return

    async def _open(self, request: Request, sessions: Sequence[Session], place: Place) -> None:
        first = sessions[0]
        target = await self._fleet.pick_target(request, first.token_ids, self._target_timeout_s)
        # No await from here on, but between long ones: the next pick must see this request's load.
        for index, session in enumerate(sessions):
            if session.finish is not None:
                place.end_one()
                continue
            if not target.is_up:  # since the last one was opened
                await self._open(request, sessions[index:], place)
                return
            draft = self._fleet.pick_draft(first.position) if first.speculate and first.may_have_draft else None
            is_fork = session is not first and session.position == first.position == session.num_prompt_tokens
            session.fork_from = first.session_id if is_fork else ""
            session.on_ended = place.end_one
            self._decode_loop.open_session(session, target, draft)
            await let_others_run(len(session.token_ids) + len(session.prediction))
