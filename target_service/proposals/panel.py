"""Drafters that a target runs itself: asked before each step, and what they offer joins the one tree of the session.

Each call is timed. In a session where a drafter's offers bring less than they cost it is asked less and less, up to
every 64th step, and at every step again once a token of it is accepted. One that raises, offers what is no tree, or
does not return is dropped for good: all sessions go on without it.

What is verified of their offers `Pacing` decides, by what became of earlier ones (`policy/source_records.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import torch

from specdec.drafters.interface import Context, Drafter, Room, SessionDrafter
from specdec.drafters.options import DrafterOptions
from specdec.drafters.registry import make_drafter
from specdec.engine.tree import ROOT
from specdec.sampling_params import VerifyMode
from target_service.decide import Decision
from target_service.pacing import Pacing
from target_service.policy.source_records import OwnRecord
from target_service.proposals.deadline import Deadline, Overdue
from target_service.session import SessionState, TargetSession
from target_service.tree.speculation_tree import Node

MOST_CALL_S = 0.25
"""Of CPU time that one call may take: a thousand times what it should."""
_MOST_INTERVAL = 64
"""Steps between two calls of a drafter that brings nothing."""
_JUDGED_CALLS = 16
"""Before a drafter is judged in a session."""
_WEIGHT = 1 / 16
"""Of a call in the means of a session."""
_COST_WEIGHT = 1 / 64
_FREE_TOKENS = 0.005
"""Calls that cost no more are not worth leaving out."""
_log = structlog.get_logger("specdec.worker")


class PanelRecorder(Protocol):
    """Is told what drafters did."""

    def asked(self, drafter: str, num_nodes: int, elapsed_s: float) -> None:
        """A drafter offered so many nodes."""

    def judged(self, drafter: str, num_verified: int, accepted_depths: Sequence[int]) -> None:
        """So many of them were verified, and those at these depths accepted."""

    def dropped(self, drafter: str) -> None:
        """A drafter is not asked any more."""


@dataclass(slots=True)
class DrafterStep:
    """What a drafter did for a session's step."""

    name: str
    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    elapsed_s: float = 0.0


@dataclass(slots=True)
class _Part:
    """A drafter's part of a session, and whether it pays."""

    name: str
    drafter: SessionDrafter
    wait: int = 0
    """Steps until it is asked again."""
    interval: int = 1
    num_calls: int = 0
    gain: float = 0.0
    """Tokens accepted thanks to a call: a mean."""
    step: DrafterStep | None = None
    """What it did for the step at hand; None: it was not asked."""

    def judge(self, credit: float, cost_tokens: float) -> None:
        """A step is over for which it was asked."""
        self.num_calls += 1
        self.gain += max(_WEIGHT, 1 / self.num_calls) * (credit - self.gain)
        if credit > 0:
            self.interval = 1
        elif self.num_calls >= _JUDGED_CALLS and self.gain + _FREE_TOKENS < cost_tokens:
            self.interval = min(_MOST_INTERVAL, 2 * self.interval)
        self.wait = self.interval - 1


@dataclass(slots=True)
class _Known:
    """What the panel keeps of a session."""

    context: Context
    parts: list[_Part] = field(default_factory=list)
    asked_at: int = 0
    """Number of its tokens when drafters were last asked."""


class DrafterPanel:
    """Asks drafters for sessions, and tells them what became of it. Without any it does nothing."""

    def __init__(self, options: Iterable[DrafterOptions], vocab_size: int, recorder: PanelRecorder) -> None:
        self._drafters: dict[str, Drafter] = {each.method: make_drafter(each, vocab_size) for each in options}
        self._vocab_size = vocab_size
        self._recorder = recorder
        self._known: dict[str, _Known] = {}
        self._costs_s: dict[str, float] = {}
        self._deadline = Deadline(MOST_CALL_S)

    @property
    def names(self) -> list[str]:
        """Drafters that are asked."""
        return list(self._drafters)

    def add(self, name: str, drafter: Drafter) -> None:
        """Ask one more drafter for all sessions, those that run included."""
        self._drafters[name] = drafter
        for known in self._known.values():
            self._open(known, name, drafter)

    def remove(self, name: str) -> None:
        """Do not ask a drafter any more; what it has offered may still be verified."""
        self._drafters.pop(name, None)
        for known in self._known.values():
            known.parts = [part for part in known.parts if part.name != name]

    # --- before a step

    def propose(self, sessions: Iterable[TargetSession], pacing: Pacing) -> None:
        """Hang offers on the trees of sessions whose next step is due."""
        if not self._drafters:
            return
        for session in sessions:
            if session.state is not SessionState.DECIDED or not pacing.may_offer(session):
                continue
            known = self._session(session)
            if known.asked_at == session.num_tokens:
                continue
            known.asked_at = session.num_tokens
            depth = min(session.max_nodes, session.end.max_depth(session.num_tokens))
            if depth > 0:
                self._ask(session, known, Room(session.max_nodes, depth))

    def _ask(self, session: TargetSession, known: _Known, room: Room) -> None:
        if session.mode is VerifyMode.REJECTION and len(session.tree):
            return  # a draft's chain is there: beside it nothing could be verified
        for part in tuple(known.parts):
            if part.wait > 0:
                part.wait -= 1
                continue
            began_s = time.monotonic()
            try:
                with self._deadline.armed():
                    offer = part.drafter.propose(known.context, room)
                elapsed_s = time.monotonic() - began_s
                num_nodes = 0
                if offer is not None:
                    num_nodes = session.tree.hang(part.name, offer.token_ids, offer.parents, offer.scores)
            except (Exception, Overdue) as error:
                self._drop(part.name, error)
                continue
            cost_s = self._costs_s.get(part.name, elapsed_s)
            self._costs_s[part.name] = cost_s + _COST_WEIGHT * (elapsed_s - cost_s)
            part.step = DrafterStep(part.name, num_nodes, elapsed_s=elapsed_s)
            self._recorder.asked(part.name, num_nodes, elapsed_s)

    def _session(self, session: TargetSession) -> _Known:
        known = self._known.get(session.session_id)
        if known is None:
            body = session.body
            context = Context(session.token_ids, body.num_prompt_tokens, body.cache_salt, session.prediction)
            known = self._known[session.session_id] = _Known(context)
            for name, drafter in tuple(self._drafters.items()):
                if session.wanted_drafters is None or name in session.wanted_drafters:
                    self._open(known, name, drafter)
                    session.own_records[name] = OwnRecord()
        return known

    def _open(self, known: _Known, name: str, drafter: Drafter) -> None:
        try:
            with self._deadline.armed():
                opened = drafter.open(known.context)
        except (Exception, Overdue) as error:
            self._drop(name, error)
            return
        if opened is not None:
            known.parts.append(_Part(name, opened))

    # --- after a step

    def read(self, decisions: Sequence[Decision], logits: torch.Tensor) -> None:
        """Tell drafters that want it what the target found likeliest after each verified token.

        Before the decisions are committed. In rejection mode only rows on the committed path count: tokens that were
        drawn and refused must leave no trace (docs/rejection.md).
        """
        num_top = max((d.capabilities.num_target_top for d in self._drafters.values()), default=0)
        if num_top == 0:
            return
        rows: list[int] = []
        shares: list[tuple[_Known, list[int]]] = []
        for decision in decisions:
            candidate = decision.candidate
            known = self._known.get(candidate.session.session_id)
            if known is None:
                continue
            is_rejection = candidate.session.mode is VerifyMode.REJECTION
            nodes = decision.walk.rows if is_rejection else range(ROOT, candidate.num_nodes)
            last = candidate.session.token_ids[-1]
            shares.append((known, [last if node == ROOT else candidate.tree.token_ids[node] for node in nodes]))
            rows += [candidate.root_row + 1 + node for node in nodes]
        if not rows:
            return
        needed = logits if rows == list(range(len(logits))) else logits[rows]
        top_ids = needed[:, : self._vocab_size].topk(min(num_top, self._vocab_size), dim=1).indices.tolist()
        first = 0
        for known, token_ids in shares:
            best = top_ids[first : first + len(token_ids)]
            first += len(token_ids)
            for part in tuple(known.parts):
                drafter = self._drafters[part.name]
                if drafter.capabilities.num_target_top:
                    try:
                        with self._deadline.armed():
                            drafter.verified(known.context, token_ids, best)
                    except (Exception, Overdue) as error:
                        self._drop(part.name, error)

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
                part.judge(credits[part.name], self._costs_s.get(part.name, 0.0) / token_s)
                self._recorder.judged(part.name, part.step.num_verified, depths[part.name])
                part.step = None
        return list(steps.values())

    def closed(self, session: TargetSession) -> None:
        """A session has ended."""
        known = self._known.pop(session.session_id, None)
        if known is None:
            return
        for part in known.parts:
            try:
                with self._deadline.armed():
                    part.drafter.close(known.context)
            except (Exception, Overdue) as error:
                self._drop(part.name, error)

    def _drop(self, name: str, error: BaseException) -> None:
        reason = "it does not return" if isinstance(error, Overdue) else repr(error)
        _log.error("drafter_dropped", drafter=name, reason=reason, exc_info=error)
        self.remove(name)
        self._recorder.dropped(name)


def _steps_of(payload: Node, steps: dict[str, DrafterStep]) -> list[DrafterStep]:
    """Of those who proposed a node."""
    return [steps[source] for source, _ in payload.offers() if source in steps]
