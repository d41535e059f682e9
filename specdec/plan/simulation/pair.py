"""A target and its share of a draft, step by step, with the target's own pacing."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import simpy

from specdec.config.drafter_options import DRAFT_MODEL
from specdec.drafting.role.growth import GrowthPolicy
from specdec.engine.sampling.token_history import TokenHistory
from specdec.engine.sequence import Sequence as EngineSequence
from specdec.plan.inputs.step_times import StepTable
from specdec.plan.simulation.draft import VOCABULARY, SimulatedDraft, token_at
from specdec.replica.worker.sessions import Owner
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.session import SessionState, SessionTimes, TargetSession
from specdec.target_service.tree.speculation_tree import SpeculationTree
from specdec.target_service.tree.walk import EndOfChoice, Walk, walk_tree
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import RejectionMethod, SamplingParams, VerifyMode

RESENT_S = 0.2
"""Seconds after which a lost packet is sent again: TCP's least time-out."""
_LONGEST = 1_000_000
"""Tokens of a context, at most: sessions end by their length."""


class Speculation(StrEnum):
    """Whether sessions speculate."""

    ON = "on"
    OFF = "off"
    ADAPTIVE = "adaptive"
    """While the gate finds that it pays, the default of targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    """One target and what it has of a draft."""

    target: StepTable
    draft: StepTable | None
    """None: no draft."""
    acceptance: Sequence[float]
    """Probability that a guess at depth 1, 2, ... is right if those before it are; deeper ones as the last."""
    is_together: bool = False
    """The target runs the draft itself, in turns with itself."""
    targets_per_draft: float = 1.0
    """Targets that share a draft's device; ignored for `is_together`."""
    delay_s: float = 0.0
    """Seconds of a message between target and draft, one way."""
    loss: float = 0.0
    """Share of messages of which a packet is lost and sent again; later ones wait behind it."""
    prompt_tokens: float = 0.0
    """Tokens of each session's prompt, which the draft computes before it drafts for it."""
    verdict_s: float = 0.0
    """Processor seconds of the services per verdict, where they share the draft's core; 0: it is the draft's own."""
    max_draft_tokens: int = 8
    max_ahead_tokens: int = 16


@dataclass(slots=True)
class PairTally:
    """What a run of a pair has counted."""

    turns_s: list[float] = field(default_factory=list)
    """Seconds from the end of each step to the next one's."""
    tokens: list[int] = field(default_factory=list)
    """Tokens that each session committed in each step."""
    draft_busy_s: float = 0.0
    elapsed_s: float = 0.0
    num_speculating: int = 0
    """Steps of sessions in which they speculated."""


class Pair:
    """A constant number of sessions decodes; a new one takes the place of one that ends."""

    def __init__(
        self, settings: PairSettings, speculation: Speculation, num_sessions: int, output_tokens: float, seed: int
    ) -> None:
        """`output_tokens`: mean tokens of a session; lengths are exponential, at least 1."""
        self.env = simpy.Environment()
        self.tally = PairTally()
        self.pacing = Pacing(None, is_gated=speculation is Speculation.ADAPTIVE)
        self._settings = settings
        self._speculates = speculation is not Speculation.OFF and settings.draft is not None
        self._rng = random.Random(seed)
        self._mean = output_tokens
        growth = GrowthPolicy(settings.max_ahead_tokens, max_nodes=64, max_heads=1)
        self._draft = SimulatedDraft(acceptance=settings.acceptance, growth=growth, rng=random.Random(seed + 1))
        self._owner = Owner("plan", 1, 1)
        self._num_begun = 0
        self._arrived = self.env.event()
        self._wanted = self.env.event()
        self._cost_s = 0.0
        self._host_s = self._host_told_s = 0.0
        """Seconds of the services' work that the draft's core has before it, and when they were counted."""
        self._is_draft_idle = False
        self._last_s = {"to the draft": 0.0, "to the target": 0.0}
        """Arrival of the latest message, by direction."""
        self._by_id: dict[str, TargetSession] = {}
        self.sessions = [self._new_session() for _ in range(num_sessions)]

    def run(self, warm_up_s: float, most_s: float, most_steps: int) -> PairTally:
        """Decode for `most_s` or `most_steps` after a warm-up, which is not counted."""
        self.env.process(self._steps())
        if self._speculates and not self._settings.is_together:
            self.env.process(self._drafts())
        self.env.run(until=warm_up_s)
        self.tally = PairTally()
        while self.env.now < warm_up_s + most_s and len(self.tally.turns_s) < most_steps:
            self.env.step()
        self.tally.elapsed_s = self.env.now - warm_up_s
        return self.tally

    # --- the target

    def _new_session(self) -> TargetSession:
        number, self._num_begun = self._num_begun, self._num_begun + 1
        length = max(2, round(self._rng.expovariate(1 / self._mean)))
        params = SamplingParams(max_tokens=length, seed=number, temperature=0.0)
        session = TargetSession(
            session_id=f"s{number}",
            epoch=1,
            owner=self._owner,
            body=pb.OpenSession(token_ids=[token_at(0)], num_prompt_tokens=1),
            params=params,
            mode=VerifyMode.COUPLED,
            rejection_method=RejectionMethod.STANDARD,
            end=EndOfChoice(params, 1, _LONGEST),
            history=TokenHistory([]),
            tree=SpeculationTree(VOCABULARY),
            max_nodes=self._settings.max_draft_tokens if self._speculates else 0,
            has_draft=not self._settings.is_together,
            credit_position=_LONGEST,
            times=SessionTimes(float(self.env.now)),
            sources=DRAFT_MODEL,
        )
        session.begin(EngineSequence(seq_id=number, token_ids=[token_at(0)], num_prompt_tokens=1))
        session.decided(float(self.env.now))
        self._by_id[session.session_id] = session
        if self._speculates:
            self._draft.open(session.session_id, round(self._settings.prompt_tokens))
            self._wake_draft()
        return session

    def _steps(self) -> Generator[simpy.Event, Any, None]:
        """Turn after turn: merge proposals, wait for more, compute, commit."""
        ended_s = 0.0
        while True:
            if self._speculates and self._settings.is_together:
                drafted_s = self._draft_here()
                if drafted_s:
                    yield self.env.timeout(drafted_s)
            while True:
                self._merge()
                self.pacing.plan(self.sessions, float(self.env.now))
                wait_s = self.pacing.wait_s(self.sessions, float(self.env.now))
                if not wait_s or wait_s <= 0:
                    break
                self._arrived = self.env.event()
                yield self.env.any_of([self._arrived, self.env.timeout(wait_s)])
            now_s = float(self.env.now)
            self.pacing.count_vain_waits(self.sessions, now_s)
            chosen = self.pacing.choose_trees(self.sessions, now_s)
            num_rows = len(self.sessions) + sum(map(len, chosen.values()))
            step_s = self._settings.target.seconds(len(self.sessions), num_rows)
            yield self.env.timeout(step_s)
            self._commit(chosen, num_rows, step_s, float(self.env.now) - ended_s)
            ended_s = float(self.env.now)

    def _merge(self) -> None:
        now_s = float(self.env.now)
        for session in self.sessions:
            arrived, session.arrived = session.arrived, None
            if not isinstance(arrived, bytes):
                continue
            if not self.pacing.may_verify(session):
                session.tree.clear()
                continue
            proposal, depth_before = pb.Proposal.FromString(arrived), session.tree.lasting_depth
            session.tree.merge(proposal, session.token_ids)
            self.pacing.observe_proposal(session, depth_before, proposal, now_s)

    def _commit(self, chosen: dict[str, list[int]], num_rows: int, step_s: float, turn_s: float) -> None:
        now_s, pacing = float(self.env.now), self.pacing
        gates = [session.gate for session in self.sessions]
        num_speculating = sum(pacing.gate.is_open(gate) for gate in gates) if self._speculates else 0
        num_committed = [self._decide(session, chosen.get(session.session_id, []), now_s) for session in self.sessions]
        pacing.observe_step(num_rows, step_s)
        pacing.expectations.observe_rate(sum(num_committed), turn_s)
        self._add_host_work(self._settings.verdict_s * len(self.sessions))
        pacing.gate.observe_turn(
            gates,
            num_tokens=num_committed,
            turn_s=turn_s,
            now_s=now_s,
            waiting=[s.gate for s in self.sessions if s.gate is not None and s.state is not SessionState.ENDED],
            num_nodes=num_rows - len(self.sessions),
            row_s=pacing.clock.rows.row_s,
        )
        self.tally.turns_s.append(turn_s)
        self.tally.tokens += num_committed
        self.tally.num_speculating += num_speculating
        for index, session in enumerate(self.sessions):
            if session.state is SessionState.ENDED:
                self.sessions[index] = self._new_session()
        self._wake_draft()

    def _decide(self, session: TargetSession, chosen: list[int], now_s: float) -> int:
        """Commit a session's tokens of a step; returns their number."""
        num_before, tree, pacing = session.num_tokens, session.seq.tree, self.pacing
        if tree is None:
            tree = SpeculationTree(VOCABULARY).tokens

        def decide(row: int) -> int:
            return token_at(num_before + tree.depth(row))

        walk: Walk = walk_tree(tree, len(chosen), decide, session.end, num_before, pb.ORIGIN_DECODE)
        is_suspended = pacing.observe_gain(session, walk, len(chosen), now_s)
        pacing.expectations.observe_walk(session, session.tree.hung(), chosen, walk)
        session.tree.advance(walk.token_ids)
        if is_suspended:
            session.tree.clear()
        session.decided(now_s)
        session.seq.token_ids.extend(walk.token_ids)
        session.seq.num_computed_tokens = session.num_tokens - 1
        if walk.finish_reason:
            session.finish()
            del self._by_id[session.session_id]
            self._draft.close(session.session_id)
        elif self._speculates:
            credit = pacing.draft_credit(self._settings.max_draft_tokens)
            position = session.num_tokens
            if self._settings.is_together:
                self._draft.commit(session.session_id, position, is_suspended=is_suspended, credit=credit)
            else:
                self.env.process(self._tell(session.session_id, position, is_suspended, credit))
        return len(walk.token_ids)

    # --- the draft

    def _tell(
        self, session_id: str, position: int, is_suspended: bool, credit: int
    ) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(self._way_s("to the draft"))
        self._draft.commit(session_id, position, is_suspended=is_suspended, credit=credit)
        self._wake_draft()

    def _way_s(self, direction: str) -> float:
        """Seconds of a message's way; messages arrive in the order in which they are sent."""
        settings, now_s = self._settings, float(self.env.now)
        is_lost = settings.loss > 0 and self._rng.random() < settings.loss
        at_s = max(self._last_s[direction], now_s + settings.delay_s + RESENT_S * is_lost)
        self._last_s[direction] = at_s
        return at_s - now_s

    def _wake_draft(self) -> None:
        if not self._wanted.triggered:
            self._wanted.succeed()

    def _drafts(self) -> Generator[simpy.Event, Any, None]:
        """Step after step over all chains that grow; other targets of the draft have as many sessions each."""
        table, share = self._settings.draft, self._settings.targets_per_draft
        assert table is not None
        while True:
            session_ids = self._draft.growing()
            if not session_ids and not self._draft.prompts:
                self._wanted = self.env.event()
                self._add_host_work(0.0)
                self._is_draft_idle = True
                yield self._wanted
                self._add_host_work(0.0)
                self._is_draft_idle = False
                continue
            num_rows = max(1, round(len(session_ids) * share)) if session_ids else 0
            step_s = table.seconds(num_rows, num_rows) if num_rows else 0.0
            if chunk := self._draft.take_chunk():
                step_s += table.prompt_seconds(max(1, round(chunk * share)), num_rows)
            self.tally.draft_busy_s += step_s
            step_s, self._host_s = step_s + self._host_s, 0.0
            yield self.env.timeout(step_s)
            self._draft.begin_chains(self._num_tokens)
            for session_id in self._draft.grow(session_ids):
                if self._draft.due(session_id):
                    proposal = self._draft.proposal(session_id, round(step_s * 1e6))
                    self.env.process(self._deliver(session_id, proposal.SerializeToString()))

    def _add_host_work(self, seconds: float) -> None:
        """The services' work is done while the draft is idle, or delays its next step."""
        now_s = float(self.env.now)
        if self._is_draft_idle:
            self._host_s = max(0.0, self._host_s - (now_s - self._host_told_s))
        self._host_s, self._host_told_s = self._host_s + seconds, now_s

    def _num_tokens(self, session_id: str) -> int:
        return self._by_id[session_id].num_tokens

    def _deliver(self, session_id: str, proposal: bytes) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(self._way_s("to the target"))
        session = self._by_id.get(session_id)
        if session is not None:
            session.arrived = proposal
            if not self._arrived.triggered:
                self._arrived.succeed()

    def _draft_here(self) -> float:
        """Draft for all sessions that speculate, if that is worth its time, as `OwnDraft` does; returns the seconds."""
        table, pacing = self._settings.draft, self.pacing
        wanted = [session for session in self.sessions if session.gate is not None and pacing.may_verify(session)]
        if table is None or not wanted:
            return 0.0
        asks = [(session, pacing.expectations.headroom(session)) for session in wanted]
        if not pacing.expectations.is_worth_asking(DRAFT_MODEL, asks, self._cost_s):
            return 0.0
        credit, drafted_s, last_step_s = pacing.draft_credit(self._settings.max_draft_tokens), 0.0, 0.0
        while chunk := self._draft.take_chunk():
            drafted_s += table.prompt_seconds(chunk, 0)
        self._draft.begin_chains(self._num_tokens)
        for _ in range(credit):
            growing = [s.session_id for s in wanted if len(self._draft.chains[s.session_id].are_right) < credit]
            if not growing:
                break
            last_step_s = table.seconds(len(growing), len(growing))
            drafted_s += last_step_s
            self._draft.grow(growing)
        for session in wanted:
            proposal = self._draft.proposal(session.session_id, round(last_step_s * 1e6))
            session.arrived = replace_complete(proposal)
            session.drafted_s += drafted_s
        self._cost_s += (drafted_s - self._cost_s) / 20 if self._cost_s else drafted_s
        return drafted_s


def replace_complete(proposal: pb.Proposal) -> bytes:
    """A proposal after which the draft proposes nothing before the next commit."""
    proposal.is_complete = True
    return proposal.SerializeToString()
