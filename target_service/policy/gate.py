"""The gate lets a session speculate while that pays, so that speculation is never slower than plain decoding.

A speculating session gains tokens, and costs every session of the batch time (`StepClock`). It speculates while it
gains more than it costs. Otherwise it is suspended: its draft gets no tokens and computes nothing. A *probe* measures
the gain of a suspended session: it speculates for some steps. One session is probed at a time, and after each probe
that pays twice as many. Of sessions of an unknown kind the first are probed; the others wait for the result. A
*reference* measures the time of a plain step: now and then no session speculates for some steps. A draft that is never
in time gains nothing, also where each request is too short to be judged: a session begins with the silence of those
before it.

Probes and misjudgements cost time. The account of each kind of sessions bounds that time (`budget.py`): below zero no
session of the kind is probed, at the floor every session of the kind is suspended. Worst case: decoding takes 1.4 %
longer than plain decoding, plus max(40 ms, a step) at each reset of a kind's account.

Lossless: in coupled mode a token is fixed before any proposal is read, so a policy may use anything. In rejection mode
a policy must not depend on drawn tokens that are not decided yet; the gate uses numbers of accepted tokens, and times.

A draft in the target's process computes a session's prompt first, in the target's time. That time is known, so it is
booked whole and apart from steps: no other prompt of the kind is computed until it is paid back.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from specdec.target_service.policy.budget import TRIAL_STEPS, WORTHWHILE, Account
from specdec.target_service.policy.gate_state import Gain, GateState, Phase
from specdec.target_service.policy.means import WEIGHT
from specdec.target_service.policy.references import References, Settling
from specdec.target_service.policy.step_clock import StepClock

_LEAVE = 1.06
"""Factor over plain decoding below which a session stops speculating; above `WORTHWHILE` it begins."""
_ODDS = 8.0
"""Negative logarithm of the probability, given the mean gain so far, at which a run of steps without an accepted token
suspends a session: exp(-8)."""
_LEAST_TRIALS = 2
"""Trials of a kind (probes, emptied accounts) that must fail before its account is no longer reset: the first text may
be unguessable."""
_MOST_FIRST = 2
"""Number of sessions of unknown kinds that are probed as they begin; the others of their group wait for the result."""
_PROBE_EVERY_S = 0.4
"""Seconds from a probe, or from a suspension, to the next probe."""


@dataclass(slots=True)
class SpeculationGate:
    """Decides for all sessions of a target. Cost: constant per session and step."""

    is_gating: bool = True
    """False: every session always speculates."""
    computes_prompts: bool = False
    """The target runs a draft itself, which computes prompts first."""
    clock: StepClock = field(default_factory=StepClock)
    _gains: defaultdict[str, Gain] = field(default_factory=lambda: defaultdict(Gain))
    """Gain of each kind of sessions."""
    _accounts: defaultdict[str, Account] = field(default_factory=lambda: defaultdict(Account))
    """An account for each kind of sessions, so that no kind pays for the losses of another."""
    _beginning: Counter[str] = field(default_factory=Counter)
    """Number of sessions, by kind, whose prompt the target's own draft computes now."""
    _num_sessions: int = 1
    _references: References = field(default_factory=References)
    _settling: Settling = field(default_factory=Settling)
    _probe_due_s: float = 0.0
    _num_probed: int = 0
    """Number of sessions under a probe."""
    _num_at_once: int = 1
    """Number of sessions that are probed together; it doubles after each probe that found a gain."""
    _min_gain_tokens: float = 0.0
    _demanded_for: int = 0
    """Number of sessions for which `_min_gain_tokens` was computed; 0: steps were observed since."""
    _node_tokens: float = 0.0
    """Tokens that the batch could decode while one more node is verified."""

    def admit(self, kind: str, now_s: float) -> GateState:
        """State of a session that begins to decode: open if its kind gains or is unknown, and its account has funds."""
        if not self.is_gating:
            return GateState(kind, Phase.ON, 0.0, now_s)
        known = self._gains.get(kind)
        gain = 0.0 if known is None else known.mean
        if known is None:
            may_begin = self._num_probed < _MOST_FIRST
        else:
            may_begin = self._pays(gain, _LEAVE)
        # Without `_may_begin` short sessions, which end before they are judged, would lose time that suspends none.
        if not (may_begin and self._may_begin(kind)):
            return GateState(kind, Phase.OFF, gain, now_s)
        self._note_beginning(kind)
        self._num_probed += known is None
        phase = Phase.PROBE if known is None else Phase.ON
        return GateState(kind, phase, gain, now_s, num_silent=self._accounts[kind].num_silent)

    def expect(self, num_sessions: int) -> None:
        """Note that the next step has `num_sessions` sessions."""
        self._num_sessions = max(1, num_sessions)

    def is_open(self, state: GateState | None) -> bool:
        """Whether a session speculates: its draft proposes, and proposals are verified. None: it never speculates."""
        if state is None:
            return False
        return not self.is_gating or (state.phase is not Phase.OFF and not self._references.num_left)

    def allows_free_nodes(self, state: GateState | None) -> bool:
        """Whether nodes that cost only their rows (n-grams of its text, say) may be verified for a session.

        They are allowed even while its draft is suspended, unless the account of its kind is below zero: their losses
        are booked there too.
        """
        if not self.is_gating or self.is_open(state):
            return True
        return not self._references.num_left and (state is None or self._accounts[state.kind].is_solvent)

    def stepped(
        self, state: GateState, num_accepted: int, has_proposal: bool, now_s: float, *, num_nodes: int = 0
    ) -> None:
        """Learn from a step of a session, and end its probe or suspend it where that follows.

        Args:
            state: of the session.
            num_accepted: accepted nodes of the session.
            has_proposal: the session had a proposal for the step.
            now_s: monotonic time in seconds.
            num_nodes: verified nodes of the session.
        """
        if not self.is_open(state):
            return
        if self._awaits_proposal(state, now_s, has_proposal=has_proposal):
            return
        state.num_counted += 1
        if not state.is_measured and state.invested_s:
            self._accounts[state.kind].observe_prompt(state.invested_s)
        state.is_measured = True
        state.num_without_acceptance = 0 if num_accepted else state.num_without_acceptance + 1
        weight = WEIGHT if state.phase is Phase.ON else 1 / state.num_counted
        gain = num_accepted - num_nodes * self._node_tokens
        state.gain += weight * (gain - state.gain)
        # Chance evens out over many sessions; trials, and silence, are few and say more.
        is_usual = state.phase is Phase.ON and not state.num_silent
        self._learn(state.kind, gain, WEIGHT / self._num_sessions if is_usual else WEIGHT)
        if not self.is_gating:
            return
        if state.phase is Phase.PROBE:
            self._consider_probe(state, now_s)
        elif state.num_without_acceptance * math.log1p(max(0.0, state.gain)) > _ODDS:
            state.gain = 0.0
            self._suspend(state, now_s)
        elif not self._pays(self._judged_gain(state), _LEAVE):
            self._suspend(state, now_s)

    def _judged_gain(self, state: GateState) -> float:
        """Gain by which a session is judged: of the gains within two standard deviations of its own moving mean, the
        one nearest to its kind's. Sessions suspended for bad luck alone end last, and hold up their group.
        """
        kind = self._gains[state.kind]
        luck = 2 * math.sqrt(kind.variance * WEIGHT / 2)
        return min(max(kind.mean, state.gain - luck), state.gain + luck)

    def _awaits_proposal(self, state: GateState, now_s: float, *, has_proposal: bool) -> bool:
        """Whether a step says nothing yet: the draft may still begin, as no session of the kind has had a proposal."""
        account = self._accounts[state.kind]
        if has_proposal:
            state.num_silent = 0
            account.heard()
            return False
        if state.num_counted and not state.num_silent:
            return False
        state.num_silent += 1
        account.num_silent += now_s > account.silent_at_s
        account.silent_at_s = now_s
        return self.computes_prompts or min(state.num_silent, account.num_silent) <= TRIAL_STEPS

    def invested(self, state: GateState, seconds: float) -> None:
        """Book `seconds` that the target spent on a session's prompt for its own draft."""
        state.invested_s += seconds
        self._accounts[state.kind].invest(seconds)

    def observe_turn(
        self,
        states: Sequence[GateState | None],
        *,
        num_tokens: Sequence[int],
        turn_s: float,
        now_s: float,
        waiting: Sequence[GateState],
        prompt_s: float = 0.0,
        num_nodes: int = 0,
        row_s: float = 0.0,
        are_free: Sequence[bool] = (),
    ) -> None:
        """Book a step of decoding, then begin references and probes that are due.

        Args:
            states: states of the step's sessions; None for a session that never speculates.
            num_tokens: tokens that each session committed.
            turn_s: seconds since the end of the step before, or since the target had work again.
            now_s: monotonic time in seconds.
            prompt_s: seconds of `turn_s` that `invested` has booked; a turn with such time says nothing of the cost of
                speculation.
            waiting: states of all decoding sessions; suspended ones among them may be probed.
            num_nodes: nodes that the step verified.
            row_s: seconds that one node costs; a session's gain is charged with its own nodes.
            are_free: for each session, whether nodes were verified though its draft is suspended; empty: for none.
        """
        if not states:
            return
        self.expect(len(states))
        self._demanded_for = 0
        speculate = [
            is_free or self.is_open(state)
            for state, is_free in zip(states, are_free or [False] * len(states), strict=True)
        ]
        num_speculating = sum(speculate)
        step_s = turn_s - prompt_s
        if not (self._settling.covers(now_s - turn_s) or prompt_s):
            rows_s = min(num_nodes * row_s, step_s / 2)
            step_s = rows_s + self.clock.observe_turn(len(states), num_speculating / len(states), step_s - rows_s)
        if not self.is_gating:
            return
        plain_s = self.clock.plain_s(len(states))
        if plain_s is not None:
            self._node_tokens = len(states) * row_s / plain_s
            self._book(states, speculate, num_tokens, step_s, plain_s, row_s)
            self._hold_to_bounds({state.kind for state in states if state is not None}, waiting, plain_s, now_s)
        if self._references.num_left:
            self._references.saw_plain(self._num_sessions)
            if self._references.ends(is_settled=now_s >= self._settling.until_s):
                self._resume(waiting, now_s)
        elif not num_speculating:
            self._references.saw_plain(self._num_sessions)
        elif self._references.begins(self.clock, self._num_sessions, step_s):
            self._settling.begin(now_s)
        if self.computes_prompts:
            self._beginning = Counter(
                state.kind for state in waiting if state.phase is not Phase.OFF and not state.is_measured
            )
        self._num_probed = sum(state.phase is Phase.PROBE for state in waiting)
        self._consider_probes(waiting, now_s)

    def _book(
        self,
        states: Sequence[GateState | None],
        speculate: Sequence[bool],
        num_tokens: Sequence[int],
        step_s: float,
        plain_s: float,
        row_s: float,
    ) -> None:
        """Book a step: the sessions that speculated share equally the time beyond a plain step's.

        A token saves its share of a plain step. Under a probe it may save the batch only its row, as the other sessions
        need the step anyway: the fewer sessions speculate, the less the probe earns.
        """
        share = sum(speculate) / len(states)
        excess_s = (step_s - plain_s) / max(1, sum(speculate))
        token_s = plain_s / len(states)
        probed_s = share * token_s + (1 - share) * min(row_s, token_s)
        for state, speculates, number in zip(states, speculate, num_tokens, strict=True):
            if state is not None:
                value_s = probed_s if state.phase is Phase.PROBE else token_s
                saved_s = (number - 1) * value_s - excess_s if speculates else 0.0
                self._accounts[state.kind].enter(step_s / len(states), saved_s, plain_s)

    def _hold_to_bounds(self, kinds: Set[str], states: Sequence[GateState], plain_s: float, now_s: float) -> None:
        """Suspend kinds whose accounts fell below the floor, and reset accounts whose respite is over.

        `kinds`: of the step's sessions; `states`: of all decoding sessions.
        """
        for kind in kinds:
            account = self._accounts[kind]
            if account.has_fallen(plain_s, now_s):
                account.num_failed += kind not in self._gains  # drafts that never proposed anything
                for state in states:
                    if state.kind == kind and state.phase is not Phase.OFF:
                        self._suspend(state, now_s)
            elif account.is_due(now_s) and (
                account.num_failed < _LEAST_TRIALS
                or any(state.kind == kind and self._pays(self._known_gain(state), WORTHWHILE) for state in states)
            ):
                account.make_even()

    def _may_begin(self, kind: str) -> bool:
        return self._accounts[kind].may_invest(self._beginning[kind])

    def _note_beginning(self, kind: str) -> None:
        if self.computes_prompts:
            self._beginning[kind] += 1

    def _probe(self, state: GateState, now_s: float) -> None:
        if not (self._accounts[state.kind].is_solvent if state.has_begun else self._may_begin(state.kind)):
            return
        state.enter(Phase.PROBE, now_s)
        account = self._accounts[state.kind]
        if account.num_silent > TRIAL_STEPS:
            account.delay_probes(self.clock.expected_plain_s(self._num_sessions), now_s)
        if not state.has_begun:
            self._note_beginning(state.kind)

    def _known_gain(self, state: GateState) -> float:
        kind = self._gains.get(state.kind)
        return kind.mean if kind is not None and not state.is_measured else state.gain

    @property
    def min_gain_tokens(self) -> float:
        """Tokens per step that a session must gain to break even, as last computed."""
        return self._min_gain_tokens

    def _pays(self, gain: float, speed_up: float) -> bool:
        """Whether `gain` accepted tokens per step make decoding `speed_up` times faster at the present load.

        Of sessions that began together the slowest ends last: with several sessions the margin is up to twice as large.
        """
        if self._demanded_for != self._num_sessions:
            self._min_gain_tokens = self.clock.min_gain_tokens(self._num_sessions)
            self._demanded_for = self._num_sessions
        margin = _LEAVE ** (1 - 1 / self._num_sessions)
        return 1 + gain >= margin * speed_up * (1 + self._min_gain_tokens)

    def _learn(self, kind: str, gain: float, weight: float) -> None:
        self._gains[kind].learn(gain, weight)

    def _consider_probe(self, state: GateState, now_s: float) -> None:
        account = self._accounts[state.kind]
        # Half a trial without an accepted token ends it, or a quarter for a kind whose trials have failed.
        most_fruitless = TRIAL_STEPS // (2 if account.num_failed < _LEAST_TRIALS else 4)
        if self._pays(state.gain * min(1.0, state.num_counted / TRIAL_STEPS), WORTHWHILE):
            state.enter(Phase.ON, now_s)
            state.num_counted = 1  # so that steps without a proposal count from now on
            if state.gain > self._gains[state.kind].mean:
                self._learn(state.kind, state.gain, 1 / 2)  # it may have been lucky
            self._num_at_once *= 2
            self._probe_due_s = now_s
        elif state.num_counted >= TRIAL_STEPS or state.num_without_acceptance >= most_fruitless:
            account.num_failed += 1
            self._suspend(state, now_s)
            self._num_at_once = 1

    def _suspend(self, state: GateState, now_s: float) -> None:
        """Suspend a session; the next probe waits until the effect on the others is measured."""
        state.enter(Phase.OFF, now_s)
        self._settling.begin(now_s)
        self._probe_due_s = max(self._probe_due_s, now_s + _PROBE_EVERY_S)

    def _resume(self, states: Sequence[GateState], now_s: float) -> None:
        """End a reference: drafts begin again, and steps before their first proposals are not counted."""
        self._settling.begin(now_s)
        for state in states:
            if state.phase is not Phase.OFF:
                state.restart()

    def _consider_probes(self, states: Sequence[GateState], now_s: float) -> None:
        if self._references.num_left:
            return
        states = [state for state in states if self._accounts[state.kind].may_probe(now_s)]
        # The rest of a request pays its prompt back: of sessions without a computed prompt the newest come first.
        off = sorted((state for state in states if state.phase is Phase.OFF), key=_turn)
        for state in off:  # at a lower load a known gain may suffice
            gain = self._known_gain(state)
            if gain > 0 and self._pays(gain, WORTHWHILE):
                self._probe(state, now_s)
        num_free = self._num_at_once - sum(state.phase is Phase.PROBE for state in states)
        if now_s < self._probe_due_s or num_free <= 0:
            return
        off = [state for state in off if state.phase is Phase.OFF]
        if not off:
            self._num_at_once = 1
        self._probe_due_s = now_s + _PROBE_EVERY_S
        for state in off[:num_free]:
            self._probe(state, now_s)


def _turn(state: GateState) -> tuple[bool, float]:
    return not state.has_begun, state.since_s if state.has_begun else -state.since_s
