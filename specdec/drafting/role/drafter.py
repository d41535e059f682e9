"""The draft's role: follows commits and grows each session's tree of guesses, all sessions in one batch.

Invariants:
    * a session's tree lies below its committed tokens; a commit keeps the part that it confirms and rolls back the
      rest, at a cost independent of the context's length;
    * in coupled mode a guess is the token that the target would sample from the draft's logits: same processing of
      logits, same noise. In rejection mode it is sampled with its own noise from the sparse distribution that travels
      with it, and the tree is a chain;
    * a proposal starts at the last committed position and carries the whole tree, so the next one replaces a lost one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from specdec.config import DraftSettings
from specdec.constraints.grammar.awaited import POLL_S, AwaitedGrammars
from specdec.constraints.limits.faults import GrammarError
from specdec.drafting.role.ahead import Ahead, Round, drawn_tokens
from specdec.drafting.role.block import MaskBlock, rounds_of
from specdec.drafting.role.branches import Branches, extend_forced
from specdec.drafting.role.commits import check_no_commit_is_lost
from specdec.drafting.role.growth import GrowthPolicy, note_target_loads
from specdec.drafting.role.guess import Guesser, Place
from specdec.drafting.role.metrics import DraftRecorder
from specdec.drafting.role.opening import new_session
from specdec.drafting.role.session import DraftSession, Guess, make_proposal
from specdec.drafting.role.work import DraftingHost, DraftWork, Holdings, context_end
from specdec.engine.errors import EngineError
from specdec.engine.outputs import StepOutput
from specdec.replica.worker.build import BuiltEngine
from specdec.replica.worker.errors import invalid
from specdec.replica.worker.opening import check_room
from specdec.replica.worker.role import DuringPass, Role
from specdec.replica.worker.sessions import Owner
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import microseconds
from specdec.wire.sampling_params import VerifyMode

_GRAMMAR_S = 0.001
"""Budget of a session's constraint between two commits, in seconds of processor time."""


class ModelDrafter(Role[DraftSession]):
    """Drafts ahead of the targets' commits. It cannot change a coupled session's output."""

    def __init__(
        self,
        host: DraftingHost[DraftSession],
        built: BuiltEngine,
        settings: DraftSettings,
        recorder: DraftRecorder,
        *,
        shares_grammars: bool = False,
    ) -> None:
        """`shares_grammars`: a target in this process uses the same compiler and exports its metrics."""
        self._host = host
        self._engine = built.engine
        max_model_len = built.info.identity.max_model_len
        self._branches = Branches(built.engine, max_model_len, settings.num_siblings)
        self._work = DraftWork(
            host,
            built,
            settings,
            recorder,
            Holdings(
                position=self.position,
                sequences=lambda session: [head.seq for head in session.heads],
                owner=lambda seq: self._branches.owner(seq)[0],
                ready=self._branches.ready,
                close=self.close_session,
            ),
        )
        self._guesser = Guesser(built.sampler, settings.num_siblings, settings.num_sparse)
        self._identity = built.info.identity
        self._settings = settings
        self._recorder = recorder
        self.growth = GrowthPolicy(settings.max_ahead_tokens, settings.max_proposal_nodes, settings.max_heads)
        """May be replaced between steps; call `plan_anew` afterwards."""
        if built.drawing is not None:
            built.drawing.prepare(drawn_tokens(settings.num_siblings))
        self._ahead = Ahead(
            built.engine, self._branches, built.drawing, settings.num_siblings, settings.num_sparse, max_model_len
        )
        mask = built.mask_token_id
        self._block = None if mask is None else MaskBlock(mask, settings.max_draft_tokens)
        self.num_rounds = 0
        """Rounds of guesses in the last step."""
        # Without a compiler guesses are unmasked, which lowers acceptance, never correctness.
        self._knows_constraints = built.grammars is not None
        self._told_grammars = None if shares_grammars else built.grammars
        self._grammars = AwaitedGrammars[DraftSession](
            built.grammars,
            lambda session: session.output,
            self._begin,
            self._work.fault,
            None if self._told_grammars is None else self._told_grammars.figures,
        )

    # --- sessions

    def open_session(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> DraftSession:
        """Check and admit a session. Raises SessionFailure, which names the field, or GrammarError."""
        settings = self._settings
        check_room(len(self._host.sessions), settings.max_sessions)
        now_s = time.monotonic()
        session = new_session(owner, session_id, epoch, body, identity=self._identity, settings=settings, now_s=now_s)
        self._recorder.opened()
        try:
            seq = self._engine.add(
                body.token_ids,
                num_prompt_tokens=body.num_prompt_tokens,
                priority=body.priority,
                cache_salt=body.cache_salt,
            )
        except EngineError as error:
            raise invalid("open.token_ids", str(error)) from error
        self._branches.plant(session, seq)
        seq.paused = self._work.beginnings.opened(session)
        if self._knows_constraints and body.sampling.HasField("constraint"):
            session.is_compiling = seq.paused = True
            try:
                self._grammars.open(session, body)
            except Exception:
                self._branches.free(session)
                raise
        return session

    def _begin(self, session: DraftSession) -> None:
        """Draft for a session whose constraint is compiled."""
        session.is_compiling = False
        self._plan(session)

    def position(self, session: DraftSession) -> int:
        """Number of committed tokens."""
        return session.num_committed

    def entry(self, session: DraftSession, kind: str, body: Any) -> None:
        """Take a commit. Raises SessionFailure if it leaves a gap or contradicts an earlier one."""
        self._work.entry(session, kind, body, self._commit)

    def close_session(self, session: DraftSession) -> None:
        """Free the sequences; full blocks of committed tokens stay in the prefix cache."""
        self._work.ending(session)
        self._grammars.drop(session)
        self._branches.free(session)

    def owner_message(self, owner: Owner, message: Any) -> None:
        """Take a target's load report, which bounds how far ahead its sessions are drafted."""
        note_target_loads(self._host.sessions.of(owner), message)

    def update_pause(self, session: DraftSession) -> None:
        """Exclude a session from steps while its owner cannot be reached."""
        self._plan(session)

    def resend(self, session: DraftSession, seen: pb.AttachedSession) -> None:
        """Propose again: the last proposal may be lost. Raises SessionFailure if commits were lost."""
        check_no_commit_is_lost(session.num_committed, seen)
        self._propose(session)

    def load(self) -> pb.LoadReport:
        """The engine's load. Also exports the gauges."""
        self._recorder.grammars(self._told_grammars)
        return self._work.load()

    # --- commits

    def _commit(self, session: DraftSession, start: int, token_ids: list[int]) -> None:
        """Commit tokens: keep the part of the tree that they confirm, roll back the rest."""
        new = self._work.new_tokens(session, session.heads[0].seq.token_ids, start, token_ids)
        if not new:
            self._plan(session)
            return
        num_nodes = len(session.tree)
        try:
            num_found = self._branches.follow(session, new)
        except EngineError as error:
            raise context_end(error, session.num_committed) from error
        self._work.committed(session, len(new), num_found, num_nodes - num_found - len(session.tree))
        if session.params.needs_history:
            session.history.append(new)
        self._follow_grammar(session, new)
        self._engine.finalize(session.heads[0].seq, session.num_committed)
        if not len(session.tree):
            session.num_unsent = 0
        self._plan(session)

    def _follow_grammar(self, session: DraftSession, new: list[int]) -> None:
        if session.grammar is None:
            return
        try:
            session.grammar.commit(new)
        except GrammarError:  # the target's grammar differs: guesses are unmasked from here on
            session.grammar = None
            return
        assert session.constraint is not None
        if session.constraint.owes(session.grammar.take_spent_s(), _GRAMMAR_S):
            session.grammar = None
            return
        if not len(session.tree):
            extend_forced(self._engine, self.growth, session, session.heads[0])

    # --- steps

    def absorb_proposals(self, now_s: float) -> None:
        """Begin sessions whose constraints are compiled; a draft receives no proposals."""
        self._grammars.poll()

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next step: 0 while a head can grow, `POLL_S` while a constraint compiles, else None."""
        if self._branches.any_ready():
            return 0
        return POLL_S if len(self._grammars) else None

    def plan_anew(self) -> None:
        """Apply a new growth policy to all heads."""
        for session in list(self._host.sessions):
            self._work.isolated(session, self._plan)

    def step(self, during: DuringPass | None = None, /) -> None:
        """Compute one batch, guess at each head whose tokens are all computed, and send proposals."""
        self.num_rounds = 0
        if self._block is not None:
            self._block.hang(self._branches.ready_places(), self.growth)
        output = self._work.step()
        if output is None:
            return
        places: list[Place] = []
        rows: list[int] = []
        num_masks: list[int] = []
        ended: list[DraftSession] = []  # their heads cannot grow; committed tokens were computed
        for item in output.items:
            session, head = self._branches.owner(item.seq)
            if item.completes and head.is_over:
                ended.append(session)
            elif item.completes and session.max_chain != 0:
                places.append((session, head))
                rows.append(item.rows.stop - 1 - item.tree_nodes)
                num_masks.append(item.tree_nodes)
        drafted = self._draft(places, rows, num_masks, output) if places else [0]
        for session in ended:
            self._work.isolated(session, self._plan)
        self._work.stepped(output, sum(drafted), len(drafted))
        self.num_rounds = len(drafted) if places else 0

    def _draft(self, places: list[Place], rows: list[int], num_masks: list[int], output: StepOutput) -> list[int]:
        """Add a guess at each place, then the tokens drawn ahead or from masks; then send due proposals.

        Returns the number of guesses by round.
        """
        drawn = self._draw_ahead(places, rows, output)
        num_rounds = 1 + max(num_masks) if drawn is None else len(drawn)
        draft_us = microseconds((time.monotonic() - self._work.started_s) / num_rounds)
        drafted: list[int] = []
        rounds = self._rounds(places, rows, num_masks, output) if drawn is None else self._ahead.due(drawn)
        for guesses in rounds:
            drafted.append(len(guesses))
            self._grow(guesses, draft_us)
            for session in {id(session): session for (session, _), _ in guesses}.values():
                session.num_unsent += 1
                self._work.isolated(session, self._choose)
        for session in {id(session): session for session, _ in places}.values():
            self._work.isolated(session, self._send_due)
        return drafted

    def _rounds(
        self, places: list[Place], rows: list[int], num_masks: list[int], output: StepOutput
    ) -> Iterator[Round]:
        for number, going in enumerate(rounds_of(places, num_masks)):
            own = [rows[i] + number for i in going]
            yield self._guesser.guess_each([places[i] for i in going], own, output.logits, self._work.fault)

    def _draw_ahead(self, places: list[Place], rows: list[int], output: StepOutput) -> list[Round] | None:
        num_branches = self.growth.num_branches(len(self._host.sessions))
        try:
            return self._ahead.draw(places, rows, output.logits, self.growth, num_branches)
        except Exception as error:  # guessing one by one finds the faulty session
            self._host.faults.note(error)
            return None

    def _grow(self, guesses: list[tuple[Place, Guess | None]], draft_us: int) -> None:
        """Add guesses to their trees. Ends only the sessions with a head without a guess."""
        for (session, _), guess in guesses:
            if guess is None:
                self._work.spoiled(session)
        for (session, head), guess in guesses:
            if guess is not None:
                extend = partial(self._branches.extend, head=head, guess=guess, draft_us=draft_us, growth=self.growth)
                self._work.isolated(session, extend)

    def _plan(self, session: DraftSession) -> None:
        """Decide which heads continue, start new ones, and send a due proposal."""
        self._choose(session)
        self._send_due(session)

    def _choose(self, session: DraftSession) -> None:
        self._branches.choose(session, self.growth, self.growth.num_branches(len(self._host.sessions)))

    def _send_due(self, session: DraftSession) -> None:
        is_idle = all(head.seq.paused for head in session.heads)
        is_free = session.mode is VerifyMode.COUPLED
        # Distributions make proposals large: in rejection mode each one has about half as many nodes again as the last.
        least = 0 if is_free else session.num_sent // 2
        is_due = session.num_unsent >= least and self.growth.is_worth_sending(session.num_unsent)
        if session.num_unsent and (is_idle or is_due):
            # In rejection mode the time of verification must not depend on the chain's tokens.
            self._propose(session, is_complete=is_idle and is_free and session.may_step)

    def _propose(self, session: DraftSession, *, is_complete: bool = False) -> None:
        num_unsent, session.num_unsent = session.num_unsent, 0
        if session.is_suspended or not len(session.tree):
            return
        session.num_sent = len(session.tree)
        self._work.send(session, make_proposal(session, is_complete=is_complete), len(session.tree), num_unsent)
