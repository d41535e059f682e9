"""Drafters that a target runs itself: asked before each step, and what they offer joins the one tree of the session.

Each call is timed. The drafter that gains most per second is asked first, and the others while the headroom is worth
their time (`expectations.py`). In a session where a drafter's offers bring less than they cost it is asked less and
less, up to every 64th step, and at every step again once a call has brought what it cost. Rows that a drafter wants
computed for itself (lookahead's window) are part of that (`window.py`). One that raises, offers what is no tree, or
does not return is dropped for good: all sessions go on without it.

Heads over the target's hidden states take in every step, and are asked for all sessions at once (`head_runner.py`).

What is verified of their offers `Pacing` decides, by what became of earlier ones (`policy/acceptance.py`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog

from specdec.config.drafter_options import DrafterOptions, HeadOptions, LayerSkipOptions
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.interface import Context, Drafter, OfNoUse, Room
from specdec.drafting.registry import make_drafter
from specdec.engine.errors import TapRefused
from specdec.engine.outputs import StepOutput
from specdec.engine.tree import ROOT
from specdec.target_service.pacing.expectations import most_accepted, note_call
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.policy.step_time import StepTimeModel
from specdec.target_service.proposals.ask_order import AskOrder
from specdec.target_service.proposals.deadline import Deadline, Overdue
from specdec.target_service.proposals.drawn import tell_drawn
from specdec.target_service.proposals.head_runner import Due, HeadRunner
from specdec.target_service.proposals.session_drafters import (
    DrafterInSession,
    DrafterRecorder,
    DrafterStep,
    SessionDrafters,
)
from specdec.target_service.proposals.window import charge_windows
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import SessionState, TargetSession
from specdec.target_service.tree.speculation_tree import Node
from specdec.wire.sampling_params import VerifyMode

MOST_CALL_S = 0.25
"""Seconds of CPU time that one call may take: a thousand times what it should."""
_log = structlog.get_logger("specdec.replica.worker")


class LocalDrafters:
    """Asks drafters for sessions, and reports to them what was accepted. Without any it does nothing."""

    def __init__(
        self,
        options: Iterable[DrafterOptions],
        recorder: DrafterRecorder,
        target: HeadTarget | None = None,
    ) -> None:
        """`target`: what heads sit on; None where there can be none.

        Raises ModelLoadError: a head's files are none, or do not fit the target.
        """
        self._drafters: dict[str, Drafter] = {}
        self._options: dict[str, DrafterOptions] = {}
        self._heads = HeadRunner(target)
        self._recorder = recorder
        self._sessions: dict[str, SessionDrafters] = {}
        self._order = AskOrder()
        self._deadline = Deadline(MOST_CALL_S)
        for each in options:
            try:
                self.add(each.method, self.make(each), each)
            except OfNoUse as error:
                self._drop(each.method, error)
        self._heads.prepare()

    def make(self, options: DrafterOptions) -> Drafter:
        """A drafter, which is not asked yet. Heads over hidden states may be made in another thread, while steps run.

        Raises HeadRefused, ModelLoadError, OfNoUse.
        """
        if isinstance(options, HeadOptions | LayerSkipOptions):
            return self._heads.load(options)
        return make_drafter(options)

    @property
    def names(self) -> list[str]:
        """Drafters that are asked."""
        return list(self._drafters)

    @property
    def told_options(self) -> list[str]:
        """The options of each drafter in `names` that are not the defaults, as a JSON object."""
        found = map(self._options.get, self._drafters)
        return ["{}" if each is None else each.model_dump_json(exclude_defaults=True) for each in found]

    @property
    def has_drafters(self) -> bool:
        """Whether any is asked."""
        return bool(self._drafters)

    def has(self, options: DrafterOptions) -> bool:
        """Whether a drafter of just these options is asked."""
        return self._options.get(options.method) == options

    def add(self, name: str, drafter: Drafter, options: DrafterOptions | None = None) -> None:
        """Ask one more drafter for all sessions, those that run included. A head knows nothing of what these have said
        so far.

        Raises TapRefused: a head reads what the target does not hand out.
        """
        self._heads.check(drafter)
        self._add(name, drafter, options)

    def _add(self, name: str, drafter: Drafter, options: DrafterOptions | None) -> None:
        self._heads.add(name, drafter)
        self._drafters[name] = drafter
        if options is not None:
            self._options[name] = options
        for own in tuple(self._sessions.values()):
            self._begin(own, name, drafter)

    def remove(self, name: str) -> None:
        """Do not ask a drafter any more; what it has offered may still be verified."""
        self._drafters.pop(name, None)
        self._options.pop(name, None)
        self._order.forget(name)
        self._heads.remove(name)
        for own in self._sessions.values():
            own.drafters = [drafter for drafter in own.drafters if drafter.name != name]

    def replace(self, names: Collection[str], made: Mapping[str, tuple[DrafterOptions, Drafter]]) -> None:
        """Ask these drafters from now on, in this order, and no others: those in `made`, also in the place of who has
        their names, and of the others those that are asked now.

        Raises TapRefused, and has changed nothing: see `add`.
        """
        for name, (_, drafter) in made.items():
            try:
                self._heads.check(drafter)
            except TapRefused as error:
                raise TapRefused(f"drafters: {name}: {error}") from error
        for name in self.names:
            if name not in names or name in made:
                self.remove(name)
        for name, (options, drafter) in made.items():
            self._add(name, drafter, options)
        self._drafters = {name: self._drafters[name] for name in names if name in self._drafters}

    # --- before a step

    def propose(self, sessions: Iterable[TargetSession], pacing: Pacing, least_worth: float = 0.0) -> None:
        """Hang offers on the trees of sessions whose next step is due, of drafters that were not asked for it yet.

        Only drafters are asked that gain at least `least_worth` tokens per second.
        """
        if not self._drafters:
            return
        due: list[tuple[TargetSession, SessionDrafters, Room]] = []
        for session in sessions:
            if session.state is not SessionState.DECIDED or not pacing.may_offer(session):
                continue
            own = self._session(session)
            if own.asked_at != session.num_tokens:
                own.asked_at = session.num_tokens
                own.asked.clear()
            depth = most_accepted(session)
            if depth > 0 and len(own.asked) < len(own.drafters):
                room = Room(session.max_nodes, depth, session.mode is VerifyMode.REJECTION)
                self._ask(session, own, room, pacing, least_worth)
                due.append((session, own, room))
        for name in self._heads.names:
            self._ask_head(name, due, pacing, least_worth)

    def _ask(
        self, session: TargetSession, own: SessionDrafters, room: Room, pacing: Pacing, least_worth: float
    ) -> None:
        if session.mode is VerifyMode.REJECTION and len(session.tree):
            return  # a draft's chain is there: beside it nothing could be verified
        expectations = pacing.expectations
        for drafter in self._order.order(own.drafters, room, expectations):
            if drafter.name in self._heads.names:
                continue
            headroom = self._order.take(drafter.name, session, own.asked, room, expectations, least_worth)
            if headroom is None or not drafter.is_due():
                continue
            num_before, began_s = len(session.tree), time.monotonic()
            try:
                with self._deadline:
                    offer = drafter.proposer.propose(own.context, room)
                elapsed_s = time.monotonic() - began_s
                num_nodes = 0
                if offer is not None:
                    num_nodes = session.tree.hang(
                        drafter.name, offer.token_ids, offer.parents, offer.scores, offer.first_window_node
                    )
            except (Exception, Overdue) as error:
                self._drop(drafter.name, error)
                continue
            note_call(session, drafter.name, headroom, num_before)
            drafter.step = DrafterStep(drafter.name, num_nodes, elapsed_s=elapsed_s)
            self._recorder.asked(drafter.name, num_nodes, elapsed_s)

    def _ask_head(
        self, name: str, due: Iterable[tuple[TargetSession, SessionDrafters, Room]], pacing: Pacing, least_worth: float
    ) -> None:
        worth: list[Due] = []
        for session, own, room in due:
            if not pacing.may_verify(session):
                continue  # it takes passes of its own: where speculation does not pay, that is not free
            headroom = self._order.take(name, session, own.asked, room, pacing.expectations, least_worth)
            if headroom is not None:
                worth.append(Due(session, own.drafters, room, headroom))
        if not worth:
            return
        try:
            self._heads.ask(name, worth, self._recorder)
        except (Exception, Overdue) as error:
            self._drop(name, error)

    def _session(self, session: TargetSession) -> SessionDrafters:
        own = self._sessions.get(session.session_id)
        if own is None:
            body = session.body
            context = Context(session.token_ids, body.num_prompt_tokens, body.cache_salt, session.prediction)
            own = self._sessions[session.session_id] = SessionDrafters(session, context)
            for name, drafter in tuple(self._drafters.items()):
                self._begin(own, name, drafter)
        return own

    def _begin(self, own: SessionDrafters, name: str, drafter: Drafter) -> None:
        """Ask a drafter for a session, if it may be."""
        if own.session.may_use(name):
            self._open(own, name, drafter)
            own.session.own_records.pop(name, None)

    def _open(self, own: SessionDrafters, name: str, drafter: Drafter) -> None:
        try:
            with self._deadline:
                opened = drafter.open(own.context)
        except (Exception, Overdue) as error:
            self._drop(name, error)
            return
        if opened is not None:
            own.drafters.append(DrafterInSession(name, opened))

    # --- after a step

    def read(self, decisions: Sequence[Decision]) -> None:
        """Tell drafters that want it what the target has drawn, before decisions are committed."""
        readers = {name for name, drafter in self._drafters.items() if drafter.capabilities.reads_drawn}
        for name, error in tell_drawn(decisions, readers, self._drafters_of, self._deadline):
            self._drop(name, error)

    def charge(self, decisions: Sequence[Decision], num_rows: int, step_time: StepTimeModel) -> None:
        """A step of `num_rows` rows is decided, and not committed yet: charge drafters with their own rows in it."""
        charge_windows(decisions, num_rows, step_time, self._drafters_of)

    def _drafters_of(self, session: TargetSession) -> list[DrafterInSession]:
        own = self._sessions.get(session.session_id)
        return [] if own is None else own.drafters

    def feed(self, output: StepOutput, decisions: Sequence[Decision], sessions: Mapping[int, TargetSession]) -> None:
        """Tell heads what a step has computed, before its decisions are committed; `sessions` by sequence number."""
        if not self._heads.names:
            return
        for name, error in self._heads.feed(
            output, decisions, sessions, lambda session: self._session(session).drafters
        ):
            self._drop(name, error)

    def learn(self, decision: Decision, pacing: Pacing) -> list[DrafterStep]:
        """A decision is about to be committed: what became of the offers below the session's last committed token.

        Returns what each drafter did that was asked.
        """
        session = decision.candidate.session
        own = self._sessions.get(session.session_id)
        if own is None:
            return []
        tree, chosen = session.tree, decision.candidate.chosen[: decision.candidate.num_nodes]
        steps = {drafter.name: drafter.step for drafter in own.drafters if drafter.step is not None}
        credits = dict.fromkeys(steps, 0.0)
        depths: dict[str, list[int]] = {name: [] for name in steps}
        verified, accepted = set(chosen), {chosen[node] for node in decision.walk.path}
        reached = {ROOT: 0}
        """Nodes on the committed path, with their depths."""
        for node, payload in enumerate(tree.nodes):
            if node in verified:
                for step in _steps_of(payload, steps):
                    step.num_verified += 1
            depth = reached.get(tree.tokens.parents[node])
            if depth is None or depth == len(decision.walk.token_ids):
                continue
            if tree.tokens.token_ids[node] == decision.walk.token_ids[depth]:
                reached[node] = depth + 1
            if node in accepted:
                who = _steps_of(payload, steps)
                for step in who:
                    step.num_accepted += 1
                    depths[step.name].append(depth + 1)
                    credits[step.name] += 1 / len(who)
        token_s = pacing.clock.rows.predict(1)
        for drafter in own.drafters:
            if drafter.step is not None:
                cost_s = self._order.observe(drafter.name, drafter.step.elapsed_s)
                drafter.judge(credits[drafter.name], cost_s / token_s + drafter.step.window_tokens)
                self._recorder.judged(drafter.name, drafter.step.num_verified, depths[drafter.name])
                drafter.step = None
        return list(steps.values())

    def copied(self, pairs: list[tuple[int, int]]) -> None:
        """Blocks of the target's cache were copied: heads copy theirs."""
        self._heads.copied(pairs)

    def closed(self, session: TargetSession) -> None:
        """A session has ended."""
        self._heads.closed(session)
        own = self._sessions.pop(session.session_id, None)
        if own is None:
            return
        for drafter in own.drafters:
            try:
                with self._deadline:
                    drafter.proposer.close(own.context)
            except (Exception, Overdue) as error:
                self._drop(drafter.name, error)

    def _drop(self, name: str, error: BaseException) -> None:
        if isinstance(error, OfNoUse):
            _log.warning("drafter_off", drafter=name, reason=str(error))
        else:
            reason = "it does not return" if isinstance(error, Overdue) else repr(error)
            _log.error("drafter_dropped", drafter=name, reason=reason, exc_info=error)
        self.remove(name)
        self._recorder.dropped(name)


def _steps_of(payload: Node, steps: dict[str, DrafterStep]) -> list[DrafterStep]:
    """Steps of the drafters that proposed a node."""
    return [steps[source] for source, _ in payload.offers() if source in steps]
