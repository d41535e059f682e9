"""Drafters that a target runs itself: asked before each step, and what they offer joins the one tree of the session.

Each call is timed. In a session where a drafter's offers bring less than they cost it is asked less and less, up to
every 64th step, and at every step again once a call has brought what it cost. Rows that a drafter wants computed for
itself (lookahead's window) are part of that (`window.py`). One that raises, offers what is no tree, or
does not return is dropped for good: all sessions go on without it.

Heads over the target's hidden states are told of every step, and asked for all sessions at once (`head_desk.py`).

What is verified of their offers `Pacing` decides, by what became of earlier ones (`policy/source_records.py`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
import torch

from specdec.drafters.interface import Context, Drafter, OfNoUse, Room
from specdec.drafters.options import DrafterOptions, HeadOptions, LayerSkipOptions
from specdec.drafters.registry import make_drafter
from specdec.engine.errors import TapRefused
from specdec.engine.outputs import StepOutput
from specdec.engine.tree import ROOT
from specdec.heads.target import HeadTarget
from specdec.sampling_params import VerifyMode
from target_service.decide import Decision
from target_service.pacing import Pacing
from target_service.policy.source_records import OwnRecord
from target_service.policy.step_time import StepTimeModel
from target_service.proposals.deadline import Deadline, Overdue
from target_service.proposals.drawn import tell_drawn
from target_service.proposals.head_desk import Due, HeadDesk
from target_service.proposals.part import DrafterPart, DrafterStep, PanelRecorder
from target_service.proposals.window import charge_windows
from target_service.session import SessionState, TargetSession
from target_service.tree.speculation_tree import Node

MOST_CALL_S = 0.25
"""Of CPU time that one call may take: a thousand times what it should."""
_COST_WEIGHT = 1 / 64
_log = structlog.get_logger("specdec.worker")


@dataclass(slots=True)
class _Known:
    """What the panel keeps of a session."""

    session: TargetSession
    context: Context
    parts: list[DrafterPart] = field(default_factory=list)
    asked_at: int = 0
    """Number of its tokens when drafters were last asked."""


class DrafterPanel:
    """Asks drafters for sessions, and tells them what became of it. Without any it does nothing."""

    def __init__(
        self,
        options: Iterable[DrafterOptions],
        vocab_size: int,
        recorder: PanelRecorder,
        target: HeadTarget | None = None,
    ) -> None:
        """`target`: what heads sit on; None where there can be none.

        Raises ModelLoadError: a head's files are none, or do not fit the target.
        """
        self._drafters: dict[str, Drafter] = {}
        self._options: dict[str, DrafterOptions] = {}
        self._heads = HeadDesk(target)
        self._recorder = recorder
        self._known: dict[str, _Known] = {}
        self._vocab_size = vocab_size
        self._costs_s: dict[str, float] = {}
        self._deadline = Deadline(MOST_CALL_S)
        for each in options:
            try:
                self.add(each.method, self.make(each), each)
            except OfNoUse as error:
                self._drop(each.method, error)

    def make(self, options: DrafterOptions) -> Drafter:
        """A drafter, which is not asked yet. Heads over hidden states may be made in another thread, while steps run.

        Raises HeadRefused, ModelLoadError, OfNoUse.
        """
        if isinstance(options, HeadOptions | LayerSkipOptions):
            return self._heads.load(options)
        return make_drafter(options, self._vocab_size)

    @property
    def names(self) -> list[str]:
        """Drafters that are asked."""
        return list(self._drafters)

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
        for known in tuple(self._known.values()):
            self._begin(known, name, drafter)

    def remove(self, name: str) -> None:
        """Do not ask a drafter any more; what it has offered may still be verified."""
        self._drafters.pop(name, None)
        self._options.pop(name, None)
        self._costs_s.pop(name, None)
        self._heads.remove(name)
        for known in self._known.values():
            known.parts = [part for part in known.parts if part.name != name]

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

    def propose(self, sessions: Iterable[TargetSession], pacing: Pacing) -> None:
        """Hang offers on the trees of sessions whose next step is due."""
        if not self._drafters:
            return
        due: list[Due] = []
        for session in sessions:
            if session.state is not SessionState.DECIDED or not pacing.may_offer(session):
                continue
            known = self._session(session)
            if known.asked_at == session.num_tokens:
                continue
            known.asked_at = session.num_tokens
            depth = min(session.max_nodes, session.end.max_depth(session.num_tokens))
            if depth > 0:
                room = Room(session.max_nodes, depth, session.mode is VerifyMode.REJECTION)
                self._ask(session, known, room)
                due.append(Due(session, known.parts, room))
        for name in self._heads.names:
            try:
                self._heads.ask(name, due, self._recorder)
            except (Exception, Overdue) as error:
                self._drop(name, error)

    def _ask(self, session: TargetSession, known: _Known, room: Room) -> None:
        if session.mode is VerifyMode.REJECTION and len(session.tree):
            return  # a draft's chain is there: beside it nothing could be verified
        for part in tuple(known.parts):
            if part.name in self._heads.names or not part.is_due():
                continue
            began_s = time.monotonic()
            try:
                with self._deadline:
                    offer = part.drafter.propose(known.context, room)
                elapsed_s = time.monotonic() - began_s
                num_nodes = 0
                if offer is not None:
                    num_nodes = session.tree.hang(
                        part.name, offer.token_ids, offer.parents, offer.scores, offer.first_window_node
                    )
            except (Exception, Overdue) as error:
                self._drop(part.name, error)
                continue
            part.step = DrafterStep(part.name, num_nodes, elapsed_s=elapsed_s)
            self._recorder.asked(part.name, num_nodes, elapsed_s)

    def _session(self, session: TargetSession) -> _Known:
        known = self._known.get(session.session_id)
        if known is None:
            body = session.body
            context = Context(session.token_ids, body.num_prompt_tokens, body.cache_salt, session.prediction)
            known = self._known[session.session_id] = _Known(session, context)
            for name, drafter in tuple(self._drafters.items()):
                self._begin(known, name, drafter)
        return known

    def _begin(self, known: _Known, name: str, drafter: Drafter) -> None:
        """Ask a drafter for a session, if it may be."""
        if known.session.may_use(name):
            self._open(known, name, drafter)
            known.session.own_records[name] = OwnRecord()

    def _open(self, known: _Known, name: str, drafter: Drafter) -> None:
        try:
            with self._deadline:
                opened = drafter.open(known.context)
        except (Exception, Overdue) as error:
            self._drop(name, error)
            return
        if opened is not None:
            known.parts.append(DrafterPart(name, opened))

    # --- after a step

    def read(self, decisions: Sequence[Decision], logits: torch.Tensor) -> None:
        """Tell drafters that want it what the target found likeliest after each verified token.

        Before the decisions are committed. In rejection mode only rows on the committed path count: tokens that were
        drawn and refused must leave no trace (docs/rejection.md).
        """
        readers = {name for name, drafter in self._drafters.items() if drafter.capabilities.reads_drawn}
        for name, error in tell_drawn(decisions, readers, self._parts, self._deadline):
            self._drop(name, error)
        num_top = max((d.capabilities.num_target_top for d in self._drafters.values()), default=0)
        if num_top == 0:
            return
        began_s = time.monotonic()
        rows: list[int] = []
        shares: list[tuple[DrafterPart, Context, list[int]]] = []
        for decision in decisions:
            candidate = decision.candidate
            known = self._known.get(candidate.session.session_id)
            part = None if known is None else next((part for part in known.parts if self._reads(part)), None)
            if known is None or part is None:
                continue
            is_rejection = candidate.session.mode is VerifyMode.REJECTION
            nodes = decision.walk.rows if is_rejection else range(ROOT, candidate.num_nodes)
            last = candidate.session.token_ids[-1]
            token_ids = [last if node == ROOT else candidate.tree.token_ids[node] for node in nodes]
            shares.append((part, known.context, token_ids))
            rows += [candidate.root_row + 1 + node for node in nodes]
        if not rows:
            return
        needed = logits if rows == list(range(len(logits))) else logits[rows]
        top_ids = needed[:, : self._vocab_size].topk(min(num_top, self._vocab_size), dim=1).indices.tolist()
        first = 0
        for part, context, token_ids in shares:
            best = top_ids[first : first + len(token_ids)]
            first += len(token_ids)
            drafter = self._drafters.get(part.name)
            if drafter is not None:
                try:
                    with self._deadline:
                        drafter.verified(context, token_ids, best)
                except (Exception, Overdue) as error:
                    self._drop(part.name, error)
        each_s = (time.monotonic() - began_s) / len(shares)
        for part, _, _ in shares:
            if part.step is not None:
                part.step.elapsed_s += each_s
                self._recorder.asked(part.name, 0, each_s)

    def charge(self, decisions: Sequence[Decision], num_rows: int, step_time: StepTimeModel) -> None:
        """A step of so many rows is decided, and not committed yet: charge drafters with their own rows in it."""
        charge_windows(decisions, num_rows, step_time, self._parts)

    def _parts(self, session: TargetSession) -> list[DrafterPart]:
        known = self._known.get(session.session_id)
        return [] if known is None else known.parts

    def _reads(self, part: DrafterPart) -> bool:
        """Whether a part wants to know what the target found: it does where it was asked for the step."""
        return part.step is not None and self._drafters[part.name].capabilities.num_target_top > 0

    def feed(self, output: StepOutput, decisions: Sequence[Decision], sessions: Mapping[int, TargetSession]) -> None:
        """Tell heads what a step has computed, before its decisions are committed; `sessions` by sequence number."""
        if not self._heads.names:
            return
        for name, error in self._heads.feed(output, decisions, sessions, lambda session: self._session(session).parts):
            self._drop(name, error)

    def learn(self, decision: Decision, pacing: Pacing) -> list[DrafterStep]:
        """A decision is about to be committed: what became of the offers below the session's last committed token.

        Returns what each drafter did that was asked.
        """
        session = decision.candidate.session
        known = self._known.get(session.session_id)
        if known is None:
            return []
        tree, chosen = session.tree, decision.candidate.chosen[: decision.candidate.num_nodes]
        steps = {part.name: part.step for part in known.parts if part.step is not None}
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
            is_next = tree.tokens.token_ids[node] == decision.walk.token_ids[depth]
            if is_next:
                reached[node] = depth + 1
            for source, score in payload.offers():
                if source in steps:
                    pacing.sources[source].observe(score, depth + 1, is_next, session.own_records.get(source))
            if node in accepted:
                who = _steps_of(payload, steps)
                for step in who:
                    step.num_accepted += 1
                    depths[step.name].append(depth + 1)
                    credits[step.name] += 1 / len(who)
        token_s = pacing.step_time.predict(1)
        for part in known.parts:
            if part.step is not None:
                cost_s = self._costs_s.get(part.name, part.step.elapsed_s)
                self._costs_s[part.name] = cost_s = cost_s + _COST_WEIGHT * (part.step.elapsed_s - cost_s)
                part.judge(credits[part.name], cost_s / token_s + part.step.window_tokens)
                self._recorder.judged(part.name, part.step.num_verified, depths[part.name])
                part.step = None
        return list(steps.values())

    def closed(self, session: TargetSession) -> None:
        """A session has ended."""
        self._heads.closed(session)
        known = self._known.pop(session.session_id, None)
        if known is None:
            return
        for part in known.parts:
            try:
                with self._deadline:
                    part.drafter.close(known.context)
            except (Exception, Overdue) as error:
                self._drop(part.name, error)

    def _drop(self, name: str, error: BaseException) -> None:
        if isinstance(error, OfNoUse):
            _log.warning("drafter_off", drafter=name, reason=str(error))
        else:
            reason = "it does not return" if isinstance(error, Overdue) else repr(error)
            _log.error("drafter_dropped", drafter=name, reason=reason, exc_info=error)
        self.remove(name)
        self._recorder.dropped(name)


def _steps_of(payload: Node, steps: dict[str, DrafterStep]) -> list[DrafterStep]:
    """Of those who proposed a node."""
    return [steps[source] for source, _ in payload.offers() if source in steps]
