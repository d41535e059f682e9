"""The draft's role if it drafts text: follows commits as text and grows a chain of its own tokens after it.

Invariants:
    * messages carry the target's tokens, and a proposal starts at the last committed one;
    * in coupled mode a token that both have is drawn with the target's noise of the position where it would stand. In
      rejection mode the likeliest is taken, so that a chain is a function of the committed tokens, a point mass.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from specdec.config import DraftSettings
from specdec.drafting.role.commits import check_no_commit_is_lost
from specdec.drafting.role.growth import GrowthPolicy, note_target_loads
from specdec.drafting.role.guess import guess_of
from specdec.drafting.role.metrics import DraftRecorder
from specdec.drafting.role.opening import read_opening
from specdec.drafting.role.session import Guess
from specdec.drafting.role.work import DraftWork, Holdings, context_end
from specdec.drafting.text.bridge import LOOK_BACK, TextBridge
from specdec.drafting.text.session import TextSession, follow, make_proposal, num_equal
from specdec.drafting.translation.build import Translated
from specdec.engine.errors import EngineError
from specdec.engine.outputs import StepOutput
from specdec.replica.worker.errors import invalid
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.isolation import each_or_halves
from specdec.replica.worker.opening import check_room
from specdec.replica.worker.role import DuringPass, Role
from specdec.replica.worker.sessions import Owner
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import microseconds

_MOST_PIECES = 4
"""Pieces of the draft per target token that may be drafted, as the draft's tokens may be shorter."""
_MIN_NEW_TOKENS = 2
"""New tokens per proposal; each message costs time in every process on its way."""


class TextDrafter(Role[TextSession]):
    """Drafts text ahead of the targets' commits. It cannot change a coupled session's output."""

    def __init__(
        self,
        host: SessionHost[TextSession],
        translated: Translated,
        settings: DraftSettings,
        recorder: DraftRecorder,
    ) -> None:
        built = translated.built
        self._host = host
        self._engine = built.engine
        self._sampler = built.sampler
        self._identity = built.info.identity
        self._bridge = TextBridge(translated.target, translated.draft, translated.vocabulary)
        self._settings = settings
        self._recorder = recorder
        self._growth = GrowthPolicy(settings.max_ahead_tokens, settings.max_proposal_nodes, 1)
        self._owners: dict[int, TextSession] = {}
        self._work = DraftWork(
            host,
            built,
            settings,
            recorder,
            Holdings(
                position=self.position,
                sequences=lambda session: [session.seq] if session.seq.seq_id in self._owners else [],
                owner=lambda seq: self._owners[seq.seq_id],
                ready=lambda: [session for session in self._owners.values() if session.seq.is_ready],
                close=self.close_session,
            ),
        )

    # --- sessions

    def open_session(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> TextSession:
        """Check and admit a session. Raises SessionFailure, which names the field."""
        check_room(len(self._host.sessions), self._settings.max_sessions)
        opening = read_opening(body, self._identity, self._settings)
        pieces = self._bridge.opening(list(body.token_ids))
        joint_ids = [joint_id for joint_id, _ in pieces]
        num_final = max(1, len(pieces) - LOOK_BACK)
        try:
            self._engine.scheduler.check_length(len(pieces))
            seq = self._engine.add(
                joint_ids[:num_final],
                num_prompt_tokens=num_final,
                priority=body.priority,
                cache_salt=body.cache_salt,
            )
            self._engine.append(seq, joint_ids[num_final:])
        except EngineError as error:
            raise invalid("open.token_ids", str(error)) from error
        self._recorder.opened()
        session = TextSession(
            session_id=session_id,
            epoch=epoch,
            owner=owner,
            body=body,
            opening=opening,
            token_ids=list(body.token_ids),
            pieces=pieces,
            seq=seq,
            committed_at_s=time.monotonic(),
        )
        self._owners[seq.seq_id] = session
        seq.paused = self._work.beginnings.opened(session)
        return session

    def position(self, session: TextSession) -> int:
        """Number of committed tokens."""
        return session.num_committed

    def entry(self, session: TextSession, kind: str, body: Any) -> None:
        """Take a commit. Raises SessionFailure if it leaves a gap or contradicts an earlier one."""
        self._work.entry(session, kind, body, self._commit)

    def close_session(self, session: TextSession) -> None:
        """Free the sequence; full blocks of committed text stay in the prefix cache."""
        self._work.ending(session)
        del self._owners[session.seq.seq_id]
        self._engine.free(session.seq)

    def owner_message(self, owner: Owner, message: Any) -> None:
        """Take a target's load report, which bounds how far ahead its sessions are drafted."""
        note_target_loads(self._host.sessions.of(owner), message)

    def update_pause(self, session: TextSession) -> None:
        """Exclude a session from steps while its owner cannot be reached."""
        self._plan(session)

    def resend(self, session: TextSession, seen: pb.AttachedSession) -> None:
        """Propose again: the last proposal may be lost. Raises SessionFailure if commits were lost."""
        check_no_commit_is_lost(session.num_committed, seen)
        session.told = None
        self._plan(session)

    def load(self) -> pb.LoadReport:
        """The engine's load. Also exports the gauges."""
        return self._work.load()

    # --- commits

    def _commit(self, session: TextSession, start: int, token_ids: list[int]) -> None:
        new = self._work.new_tokens(session, session.token_ids, start, token_ids)
        if not new:
            self._plan(session)
            return
        found = num_equal(session.written.token_ids, new)
        num_drafted = len(session.written.token_ids)
        try:
            follow(self._engine, self._bridge, session, new)
        except EngineError as error:
            raise context_end(error, session.num_committed) from error
        self._work.committed(session, len(new), found, num_drafted - found - len(session.written.token_ids))
        session.opening.history.append(new)
        self._plan(session)

    # --- steps

    def absorb_proposals(self, now_s: float) -> None:
        """Nothing to do: a draft receives no proposals."""

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next step: 0 while a sequence is ready, else None."""
        return 0 if any(session.seq.is_ready for session in self._owners.values()) else None

    def step(self, during: DuringPass | None = None, /) -> None:
        """Compute one batch, guess a token for each sequence whose tokens are all computed, and send proposals."""
        output = self._work.step()
        if output is None:
            return
        computed = [(self._owners[item.seq.seq_id], item.rows.stop - 1) for item in output.items if item.completes]
        due = [(session, row) for session, row in computed if not session.is_over and session.opening.max_chain != 0]
        guesses = self._guess(due, output)
        draft_us = microseconds(time.monotonic() - self._work.started_s)
        for session, guess in guesses:
            if guess is None:
                self._work.spoiled(session)
            else:
                self._work.isolated(session, partial(self._extend, guess=guess, draft_us=draft_us))
        self._work.stepped(output, len(guesses))
        for session, _ in computed:
            self._work.isolated(session, self._plan)

    def _guess(self, due: list[tuple[TextSession, int]], output: StepOutput) -> list[tuple[TextSession, Guess | None]]:
        def guess(some: list[tuple[TextSession, int]]) -> list[tuple[TextSession, Guess | None]]:
            contexts = [session.draw_context() for session, _ in some]
            contexts = [
                context._replace(params=replace(context.params, temperature=0.0)) if session.is_rejection else context
                for context, (session, _) in zip(contexts, some, strict=True)
            ]
            drawn = self._sampler.candidates(output.logits[[row for _, row in some]], contexts, 2)
            found = [guess_of([c.token_id for c in best], [c.score for c in best], 0) for best in drawn]
            return [(session, each) for (session, _), each in zip(some, found, strict=True)]

        if not due:
            return []
        return each_or_halves(due, guess, lambda place, error: self._work.fault(place[0], error))

    def _extend(self, session: TextSession, guess: Guess, draft_us: int) -> None:
        session.drafted.append(self._bridge.piece(guess.token_id))
        session.scores.append(guess.score)
        session.times_us.append(draft_us)
        session.written = self._bridge.written(session.token_ids, session.drafted)
        try:
            self._engine.append(session.seq, [guess.token_id])
        except EngineError:  # the draft's context ends here
            session.is_over = True
        written = session.written.token_ids
        ends = next((i for i, token in enumerate(written) if session.ends_choice(token, i)), None)
        if self._bridge.is_special(guess.token_id) or ends is not None:
            session.is_over = True

    def _plan(self, session: TextSession) -> None:
        """Decide whether a session drafts more, and send a due proposal."""
        session.seq.paused = session.is_suspended or not session.may_step or not self._wants_more(session)
        if session.is_suspended:
            session.committed_at_s = None
            return
        if session.opening.max_chain == 0 or not session.may_step:
            return
        num_new = len(session.proposed) - (session.num_told or 0)
        is_due = num_new >= _MIN_NEW_TOKENS and not session.is_rejection
        if is_due or (session.seq.paused and session.told != (session.num_committed, len(session.proposed), True)):
            self._propose(session)

    def _wants_more(self, session: TextSession) -> bool:
        # Committed tokens are computed even if nothing is drafted after them.
        if session.seq.num_computed_tokens < len(session.pieces):
            return True
        if session.is_over:
            return False
        num_tokens = len(session.written.token_ids)
        growth, limit = self._growth, session.opening.max_chain
        most_tokens = growth.max_depth(session.target_credit) if limit is None else limit
        if len(session.drafted) >= _MOST_PIECES * most_tokens:
            return False
        if limit is not None:
            return len(session.proposed) < limit
        return growth.grows(num_tokens, session.path_score, num_tokens, session.target_credit)

    def _propose(self, session: TextSession) -> None:
        before, token_ids = session.num_told or 0, session.proposed
        is_complete = session.seq.paused
        session.told = session.num_committed, len(token_ids), is_complete
        proposal = make_proposal(session, is_complete=is_complete)
        self._work.send(session, proposal, len(token_ids), max(0, len(token_ids) - before))
