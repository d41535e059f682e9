"""The draft's role over the engine: follows commits, and grows a tree of guesses for each session, all in one batch.

Invariants:
    * the tree of a session is a function of its committed tokens; a commit keeps what it confirms and rolls back the
      rest, whatever the context's length;
    * in coupled mode a guess is what the target would sample if its logits were the draft's: same processing of
      logits, same noise. In rejection mode it is drawn from the sparse distribution that travels with it, with noise
      of its own, and the tree is a chain;
    * a proposal starts at the last committed position and carries the whole tree, so a lost or late one costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from google.rpc import code_pb2

from specdec.config import DraftSettings
from specdec.drafting.ahead import Ahead, Round, drawn_tokens
from specdec.drafting.block import MaskBlock, rounds_of
from specdec.drafting.branches import Branches
from specdec.drafting.commits import CommitConflict, check_no_commit_is_lost, num_known
from specdec.drafting.forced import extend_forced
from specdec.drafting.growth import GrowthPolicy, note_target_loads
from specdec.drafting.guess import Guesser, Place
from specdec.drafting.host import DraftingHost
from specdec.drafting.metrics import DraftRecorder, load_report
from specdec.drafting.opening import new_session
from specdec.drafting.proposals import make_proposal
from specdec.drafting.session import DraftSession, Guess, Head
from specdec.drafting.trace import trace_end, trace_step
from specdec.engine.errors import EngineError, NonFiniteLogits
from specdec.engine.outputs import StepOutput
from specdec.engine.sequence import Sequence
from specdec.grammar.awaited import POLL_S, AwaitedGrammars
from specdec.grammar.failure import GrammarError
from specdec.sampling_params import VerifyMode
from specdec.v1 import common_pb2 as pb
from specdec.worker.build import BuiltEngine
from specdec.worker.clamping import microseconds
from specdec.worker.errors import SessionFailure, invalid, non_finite_logits
from specdec.worker.isolation import ApartTurns, IsolatedSteps, each_or_halves
from specdec.worker.opening import check_room
from specdec.worker.sessions import Owner


class Drafter:
    """Drafts ahead of what targets commit. Nothing it does can change a coupled session's output."""

    def __init__(
        self,
        host: DraftingHost,
        built: BuiltEngine,
        settings: DraftSettings,
        recorder: DraftRecorder,
        *,
        shares_grammars: bool = False,
    ) -> None:
        """`shares_grammars`: a target of this process compiles them, too, and tells what that takes."""
        self._host = host
        self._engine = built.engine
        self._guesser = Guesser(built.sampler, settings.num_siblings, settings.num_sparse)
        self._identity = built.info.identity
        self._settings = settings
        self._recorder = recorder
        self.growth = GrowthPolicy(settings.max_ahead_tokens, settings.max_proposal_nodes, settings.max_heads)
        """May be replaced between steps; then `plan_anew`."""
        self._apart = ApartTurns[DraftSession](lambda session: session.num_committed)
        built.engine.before_pass = self._note_pass
        max_model_len = built.info.identity.max_model_len
        self._branches = Branches(built.engine, max_model_len)
        if built.drawing is not None:
            built.drawing.prepare(drawn_tokens(settings.num_siblings))
        self._ahead = Ahead(built.engine, self._branches, built.drawing, settings.num_siblings, max_model_len)
        mask = built.mask_token_id
        self._block = None if mask is None else MaskBlock(mask, settings.max_draft_tokens)
        self._step_s = 0.0
        self.num_rounds = 0
        """Of guesses, in the last step."""
        # Without, guesses are not masked: that costs acceptance, never correctness.
        self._knows_constraints = built.grammars is not None
        self._told_grammars = None if shares_grammars else built.grammars
        self._grammars = AwaitedGrammars[DraftSession](
            built.grammars,
            lambda session: session.output,
            self._begin,
            self._fault,
            None if self._told_grammars is None else self._told_grammars.figures,
        )
        self._steps = IsolatedSteps(built.engine, is_alone=settings.tensor_parallel_size == 1)
        recorder.serves(self._identity)

    # --- sessions

    def open(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> DraftSession:
        """Check and admit a session."""
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
        if self._knows_constraints and body.sampling.HasField("constraint"):
            session.is_compiling = seq.paused = True
            try:
                self._grammars.open(session, body)
            except Exception:
                self._branches.free(session)
                raise
        return session

    def _begin(self, session: DraftSession) -> None:
        """What a session's constraint allows is known."""
        session.is_compiling = False
        self._plan(session)

    def position(self, session: DraftSession) -> int:
        """Number of committed tokens."""
        return session.num_committed

    def entry(self, session: DraftSession, kind: str, body: Any) -> None:
        """A commit."""
        if kind == "commit":
            started_s = time.monotonic()
            session.is_suspended = body.suspend
            self._commit(session, body.start_position, list(body.token_ids))
            self._recorder.commit_handled(time.monotonic() - started_s)

    def close(self, session: DraftSession) -> None:
        """Free the sequences; full blocks of committed tokens stay in the prefix cache."""
        if session.trace is not None:
            trace_end(session.trace, session.body.num_prompt_tokens, [head.seq for head in session.heads])
        self._grammars.drop(session)
        self._branches.free(session)
        self._recorder.closed()

    def owner_message(self, owner: Owner, message: Any) -> None:
        """The load that a target reported bounds how far ahead its sessions are drafted; one with no name has all."""
        note_target_loads(self._host.sessions.of(owner), message)

    def update_pause(self, session: DraftSession) -> None:
        """Sessions whose owner cannot be told take part in no step."""
        self._plan(session)

    def resend(self, session: DraftSession, seen: pb.AttachedSession) -> None:
        """Emit the chain again: whether the last proposal arrived is not known."""
        check_no_commit_is_lost(session.num_committed, seen)
        self._propose(session)

    def load(self) -> pb.LoadReport:
        """Load of the engine; exports the gauges too."""
        num_sessions = len(self._host.sessions)
        self._recorder.load(self._engine.stats(), num_sessions)
        self._recorder.grammars(self._told_grammars)
        return load_report(self._engine, num_sessions, self._settings.max_sessions, self._step_s)

    # --- commits

    def _commit(self, session: DraftSession, start: int, token_ids: list[int]) -> None:
        """Make tokens final: keep the part of the tree that they confirm, roll back what they contradict."""
        committed = session.num_committed
        try:
            held = session.heads[0].seq.token_ids
            new = token_ids[num_known(held, committed, start, token_ids, self._identity.vocab_size) :]
        except CommitConflict:
            self._recorder.mismatch()
            raise
        if not new:
            self._recorder.stale_commit()
            self._plan(session)
            return
        num_nodes = len(session.tree)
        try:
            num_found = self._branches.follow(session, new)
        except EngineError as error:
            code, reason = code_pb2.OUT_OF_RANGE, "DRAFT_CONTEXT_END"
            raise SessionFailure(code, reason, str(error), expected_position=committed) from error
        self._recorder.commit(num_found, len(new), num_nodes - num_found - len(session.tree))
        if session.trace is not None:
            session.trace.add(num_commits=1, num_tokens=len(new), num_accepted=num_found)
        session.history.append(new)
        self._follow_grammar(session, new)
        session.committed_at_s = time.monotonic()
        self._engine.finalize(session.heads[0].seq, session.num_committed)
        if session.mode is VerifyMode.REJECTION:
            session.num_unsent = len(session.tree)  # the target starts every round afresh
            if not len(session.tree):
                session.chain_start = session.num_committed
        elif not len(session.tree):
            session.num_unsent = 0
        self._plan(session)

    def _follow_grammar(self, session: DraftSession, new: list[int]) -> None:
        if session.grammar is None:
            return
        try:
            session.grammar.commit(new)
        except GrammarError:  # the target follows another one: guesses are not masked from here on
            session.grammar = None
            return
        if not len(session.tree):
            extend_forced(self._engine, self.growth, session, session.heads[0])

    # --- steps

    def absorb_proposals(self, now_s: float) -> None:
        """A draft makes proposals and gets none; sessions whose constraints are compiled begin."""
        self._grammars.poll()

    def wait_s(self, now_s: float) -> float | None:
        """0 while some head wants more; else nothing is due until a frame arrives."""
        if self._branches.any_ready():
            return 0
        return POLL_S if len(self._grammars) else None

    def plan_anew(self) -> None:
        """The growth policy is another one: heads that were done may go on, and others end."""
        for session in list(self._host.sessions):
            self._isolated(session, self._plan)

    def step(self) -> None:
        """Compute one batch, guess tokens at each head in it that is up to date, send the proposals."""
        self.num_rounds = 0
        started_s = time.monotonic()
        only = self._turn()
        if self._block is not None:
            self._block.hang(self._branches.ready_places(), self.growth)
        output = self._steps.step(lambda seq, error: self._fault(self._branches.owner(seq)[0], error), only)
        if output is None:
            return
        for seq in output.preempted:
            if (trace := self._branches.owner(seq)[0].trace) is not None:
                trace.add(num_preemptions=1)
        places: list[Place] = []
        rows: list[int] = []
        num_masks: list[int] = []
        ended: list[DraftSession] = []  # of which committed tokens were computed, in the middle of a block
        for item in output.items:
            session, head = self._branches.owner(item.seq)
            if session.trace is not None:
                trace_step(session.trace, started_s, item.completes)
            if item.completes and head.is_over:
                ended.append(session)
            elif item.completes and session.max_chain != 0:
                places.append((session, head))
                rows.append(item.rows.stop - 1 - item.tree_nodes)
                num_masks.append(item.tree_nodes)
        drafted = self._draft(places, rows, num_masks, output, started_s) if places else [0]
        for session in ended:
            self._isolated(session, self._plan)
        self._step_s = time.monotonic() - started_s
        self._recorder.step(output, sum(drafted), self._step_s / len(drafted))
        self.num_rounds = len(drafted) if places else 0

    def _draft(
        self, places: list[Place], rows: list[int], num_masks: list[int], output: StepOutput, started_s: float
    ) -> list[int]:
        """Guess a token at each place and hang it, then what was drawn ahead, or what masks say; send what is due when
        all of it hangs.

        Returns how many guesses were hung, round by round.
        """
        drawn = self._draw_ahead(places, rows, output)
        num_rounds = 1 + max(num_masks) if drawn is None else len(drawn)
        draft_us = microseconds((time.monotonic() - started_s) / num_rounds)
        drafted: list[int] = []
        rounds = self._rounds(places, rows, num_masks, output) if drawn is None else self._ahead.due(drawn)
        for guesses in rounds:
            drafted.append(len(guesses))
            self._grow(guesses, draft_us)
            for session in {id(session): session for (session, _), _ in guesses}.values():
                session.num_unsent += 1
                self._isolated(session, self._choose)
        for session in {id(session): session for session, _ in places}.values():
            self._isolated(session, self._send_due)
        return drafted

    def _rounds(
        self, places: list[Place], rows: list[int], num_masks: list[int], output: StepOutput
    ) -> Iterator[Round]:
        for number, going in enumerate(rounds_of(places, num_masks)):
            yield self._guess([places[i] for i in going], [rows[i] + number for i in going], output)

    def _draw_ahead(self, places: list[Place], rows: list[int], output: StepOutput) -> list[Round] | None:
        num_branches = self.growth.num_branches(len(self._host.sessions))
        try:
            return self._ahead.draw(places, rows, output.logits, self.growth, num_branches)
        except Exception as error:  # single guesses tell whose it is
            self._host.faults.note(error)
            return None

    def _isolated(self, session: DraftSession, work: Callable[[DraftSession], None]) -> None:
        """Work on a session, if it is still there, which ends for what that raises."""
        try:
            if session.heads:
                work(session)
        except Exception as error:
            self._fault(session, error)

    def _turn(self) -> set[int] | None:
        """The sequences whose turn it is; None: nobody steps apart, so it is everybody's."""
        if not any(session.apart_until for session in self._host.sessions):
            return None
        groups = self._apart.groups(self._branches.ready())
        self._apart.take(groups[0])
        return None if len(groups) == 1 else {head.seq.seq_id for session in groups[0] for head in session.heads}

    def _note_pass(self, sequences: list[Sequence]) -> None:
        owners = (self._branches.owner(seq)[0].key for seq in sequences)
        self._host.steps.work_on(list(dict.fromkeys(owners)))

    def _guess(self, places: list[Place], rows: list[int], output: StepOutput) -> list[tuple[Place, Guess | None]]:
        """A guess for each place whose guess can be made; `rows` are those of the places."""

        of_sessions: dict[int, list[int]] = {}
        for index, (session, _) in enumerate(places):
            of_sessions.setdefault(id(session), []).append(index)

        def guess(groups: list[list[int]]) -> list[tuple[Place, Guess | None]]:
            indices = sorted(index for group in groups for index in group)  # in the order of their rows
            own = [rows[index] for index in indices]
            logits = output.logits if len(own) == len(output.logits) else output.logits[own]
            some = [places[index] for index in indices]
            return list(zip(some, self._guesser.guess(some, logits), strict=True))

        return each_or_halves(
            list(of_sessions.values()), guess, lambda group, error: self._fault(places[group[0]][0], error)
        )

    def _grow(self, guesses: list[tuple[Place, Guess | None]], draft_us: int) -> None:
        """Hang the guesses in their trees; a session for one of whose heads there is none ends, and it alone."""
        for (session, _), guess in guesses:
            if guess is None and session.heads:
                for head in session.heads:
                    self._engine.distrust(head.seq)
                failure = non_finite_logits(NonFiniteLogits(), expected_position=session.num_committed)
                self.close(session)
                self._host.failed(session, failure)
        for (session, head), guess in guesses:
            try:
                if guess is not None and session.heads:
                    self._extend(session, head, guess, draft_us)
            except Exception as error:
                self._fault(session, error)

    def _fault(self, session: DraftSession, error: Exception) -> None:
        """End a session for what its share of the work has raised."""
        failure = self._host.faults.failure(error)
        if session.heads:
            self.close(session)
            self._host.failed(session, failure)

    def _extend(self, session: DraftSession, head: Head, guess: Guess, draft_us: int) -> None:
        num_tokens = len(head.seq.token_ids)
        parent = head.node
        is_end = session.ends_choice(guess.token_id, num_tokens + 1)
        head.node = session.add(parent, guess.token_id, guess.score, is_end, draft_us, guess.sample)
        for token_id, score in guess.siblings:
            if len(session.tree) < self.growth.node_limit:
                ends = session.ends_choice(token_id, num_tokens + 1)
                session.add(parent, token_id, score, ends, draft_us, None)
        try:
            self._engine.append(head.seq, [guess.token_id])
        except EngineError:  # the draft's context ends here: the guess stands, nothing can follow it
            head.node, head.is_over = parent, True
            return
        head.is_over = is_end
        if not is_end:
            extend_forced(self._engine, self.growth, session, head)

    def _plan(self, session: DraftSession) -> None:
        """Decide which heads grow on, start new ones, and send what is due."""
        self._choose(session)
        self._send_due(session)

    def _choose(self, session: DraftSession) -> None:
        growth = self.growth
        if session.is_suspended or session.is_compiling:
            session.num_unsent, session.committed_at_s = 0, None
            for head in session.heads:
                head.seq.paused = True
            return
        if session.mode is VerifyMode.COUPLED and session.max_chain is None and session.may_step:
            num_branches = growth.num_branches(len(self._host.sessions))
            if num_branches or len(session.heads) > 1:
                self._branches.start(session, growth, num_branches - self._branches.retire(session, growth))
        for head in session.heads:
            head.seq.paused = not session.may_step or not self._wants_more(session, head)

    def _send_due(self, session: DraftSession) -> None:
        is_idle = all(head.seq.paused for head in session.heads)
        is_due = session.max_chain is None and self.growth.is_worth_sending(session.num_unsent)
        if session.num_unsent and (is_idle or is_due):
            # In rejection mode when a chain is verified must not depend on the tokens in it.
            is_free = session.mode is VerifyMode.COUPLED
            self._propose(session, is_complete=is_idle and is_free and session.may_step)

    def _wants_more(self, session: DraftSession, head: Head) -> bool:
        # Committed tokens are computed at once, also when nothing is to be drafted after them.
        if head.seq.num_computed_tokens < session.num_committed:
            return True
        if head.is_over:
            return False
        depth = session.tree.depth(head.node)
        if session.max_chain is not None:
            return depth < min(session.max_chain, self.growth.max_ahead_tokens)
        score = session.path_score(head.node)
        return self.growth.grows(depth, score, len(session.tree), session.target_credit)

    def _propose(self, session: DraftSession, *, is_complete: bool = False) -> None:
        num_unsent, session.num_unsent = session.num_unsent, 0
        if session.is_suspended or not len(session.tree):
            return
        waited_s = time.monotonic() - session.committed_at_s if session.committed_at_s is not None else None
        self._recorder.proposal(len(session.tree), num_unsent, waited_s)
        if session.trace is not None:
            session.trace.add(num_proposals=1)
        session.committed_at_s = None
        self._host.emit(session, proposal=make_proposal(session, is_complete=is_complete).SerializeToString())
