"""Drafters that a target runs itself: they are asked before each step, and their offers join the session's one tree.

Each call is timed. The drafter that gains most per second is asked first, and the others while the headroom is worth
their time (`expectations.py`). If a drafter's offers gain less than they cost in a session, it is asked there more and
more rarely, down to every 64th step; a call that gains its cost has it asked at every step again. The cost includes
the rows of its window (`window.py`). A drafter that raises, offers no tree, or does not return is dropped: all sessions
go on without it.

Heads take in the hidden states of every step, and are asked for all sessions in one call (`head_runner.py`).

`Pacing` chooses the offers to verify, by the acceptance of earlier ones (`policy/acceptance.py`).
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
    SessionDrafters,
)
from specdec.target_service.proposals.window import charge_windows
from specdec.target_service.records.step_record import DrafterStep
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import SessionState, TargetSession
from specdec.target_service.tree.proposed import Node
from specdec.wire.sampling_params import VerifyMode

MOST_CALL_S = 0.25
"""Seconds of CPU time that one call may take: about a thousand times a usual call."""
_log = structlog.get_logger("specdec.replica.worker")


class LocalDrafters:
    """Asks drafters for sessions, and learns from the outcome of their offers. Without drafters it does nothing."""

    def __init__(
        self,
        options: Iterable[DrafterOptions],
        recorder: DrafterRecorder,
        target: HeadTarget | None = None,
    ) -> None:
        """`target`: model and engine under heads; None: heads are refused.

        Raises ModelLoadError: a head cannot be loaded, or does not fit the target.
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
        """Make a drafter, not asked yet. Heads over hidden states may be made in another thread, while steps run.

        Raises HeadRefused, ModelLoadError, OfNoUse.
        """
        if isinstance(options, HeadOptions | LayerSkipOptions):
            return self._heads.load(options)
        return make_drafter(options)

    @property
    def names(self) -> list[str]:
        """Names of the drafters that are asked, in order."""
        return list(self._drafters)

    @property
    def told_options(self) -> list[str]:
        """The options of each drafter in `names` that differ from the defaults, as a JSON object."""
        found = map(self._options.get, self._drafters)
        return ["{}" if each is None else each.model_dump_json(exclude_defaults=True) for each in found]

    @property
    def has_drafters(self) -> bool:
        """Whether any drafter is asked."""
        return bool(self._drafters)

    def has(self, options: DrafterOptions) -> bool:
        """Whether a drafter with exactly these options is asked."""
        return self._options.get(options.method) == options

    def add(self, name: str, drafter: Drafter, options: DrafterOptions | None = None) -> None:
        """Ask one more drafter for all sessions, running ones included. A head lacks the hidden states of their earlier
        tokens.

        Raises TapRefused: a head reads layers that the target does not hand out.
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
        """Stop asking a drafter; its earlier offers may still be verified."""
        self._drafters.pop(name, None)
        self._options.pop(name, None)
        self._order.forget(name)
        self._heads.remove(name)
        for own in self._sessions.values():
            own.drafters = [drafter for drafter in own.drafters if drafter.name != name]

    def replace(self, names: Collection[str], made: Mapping[str, tuple[DrafterOptions, Drafter]]) -> None:
        """Ask exactly the drafters `names` from now on, in this order.

        Args:
            names: a name that is neither in `made` nor asked now is ignored.
            made: new drafters by name, with their options; they replace those of the same name.

        Raises:
            TapRefused: see `add`; nothing is changed.
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
        """Ask the drafters that had no turn yet for the sessions' next step, and hang their offers on the trees.

        `least_worth`: tokens per second that a drafter must gain to have its turn now.
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
            return  # a draft's chain is there, and only one chain can be verified
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
                continue  # a head's forward passes are not free nodes
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
        """Open a drafter for a session, if the client allows the drafter."""
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
        """Report the target's drawn tokens to drafters that read them, before decisions are committed."""
        readers = {name for name, drafter in self._drafters.items() if drafter.capabilities.reads_drawn}
        for name, error in tell_drawn(decisions, readers, self._drafters_of, self._deadline):
            self._drop(name, error)

    def charge(self, decisions: Sequence[Decision], num_rows: int, step_time: StepTimeModel) -> None:
        """Charge drafters with their window's rows in a step of `num_rows` rows, before its decisions are committed."""
        charge_windows(decisions, num_rows, step_time, self._drafters_of)

    def _drafters_of(self, session: TargetSession) -> list[DrafterInSession]:
        own = self._sessions.get(session.session_id)
        return [] if own is None else own.drafters

    def feed(self, output: StepOutput, decisions: Sequence[Decision], sessions: Mapping[int, TargetSession]) -> None:
        """Give heads a step's hidden states, before its decisions are committed; `sessions`: by sequence id."""
        if not self._heads.names:
            return
        for name, error in self._heads.feed(
            output, decisions, sessions, lambda session: self._session(session).drafters
        ):
            self._drop(name, error)

    def learn(self, decision: Decision, pacing: Pacing) -> list[DrafterStep]:
        """Learn the outcome of the offers on a session's tree, before its decision is committed.

        Returns the records of the drafters that were asked for the step.
        """
        session = decision.candidate.session
        own = self._sessions.get(session.session_id)
        if own is None:
            return []
        tree, chosen = session.tree, decision.candidate.chosen[: decision.candidate.num_nodes]
        steps = {drafter.name: drafter.step for drafter in own.drafters if drafter.step is not None}
        credits = dict.fromkeys(steps, 0.0)
        depths: dict[str, list[int]] = {name: [] for name in steps}
        verified, accepted = set(chosen), set(decision.accepted)
        reached = {ROOT: 0}
        """Depths of the root and of the tree's nodes on the committed path."""
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
        """Copy the heads' blocks as the target's were copied: (source, destination), in order."""
        self._heads.copied(pairs)

    def closed(self, session: TargetSession) -> None:
        """Forget a session that has ended, and close its drafters."""
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
