"""A target, its drafts and its clients as numbers that the gate observes, with a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.policy.gate_state import GateState

_CHUNK_S = 0.02
"""Seconds of a prompt's chunk between two steps."""


@dataclass(frozen=True)
class Weather:
    """Conditions at one time."""

    accepts: float = 1.0
    """Mean accepted tokens per step of a session that speculates; at most seven are accepted at once."""
    costs: float = 0.2
    """Ratio of a step's additional time to a plain step's if all sessions speculate."""
    sessions: int = 1
    answers: bool = True
    """Whether drafts propose at all."""


@dataclass
class Session:
    left: int
    number: int
    prompt_s: float
    """Seconds of the target's time that the draft still needs for the prompt."""
    state: GateState | None = None
    catch_up: int = 0


@dataclass
class World:
    """Decodes without end; new sessions take the places of ended ones."""

    at: Callable[[float], Weather]
    length: int = 400
    seed: int = 0
    gate: SpeculationGate = field(default_factory=SpeculationGate)
    accepts_of: Callable[[int, float], float] | None = None
    """Mean accepted tokens by the session's number and the time; None: `Weather.accepts`."""
    kind_of: Callable[[int], str] = lambda _: "greedy"
    """Kind of a session, by its number."""
    noise: float = 0.05
    step_s: float = 0.01
    """Seconds of a plain step without sessions."""
    context_s: Callable[[int], float] = lambda _: 0.0
    """Seconds that a session's context adds to a plain step, by the session's number."""
    prompt_s: float = 0.0
    """Seconds of the target's time in which a draft computes a session's prompt before it proposes."""
    lag_s: float = 0.0
    """Seconds for which a draft continues to work after it is suspended."""
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.gate.computes_prompts = self.prompt_s > 0
        self.random = random.Random(self.seed)
        self.sessions: list[Session] = []
        self.num_begun = 0
        self._at_work = (0.0, 0.0)
        """Share of the drafts that work, and the end of that in seconds."""

    def run(self, seconds: float) -> tuple[float, float]:
        """Run steps; returns their seconds, and those of plain decoding for the same tokens."""
        took_s = plain_s = 0.0
        for step_s, plain in self.steps(seconds):
            took_s += step_s
            plain_s += plain
        return took_s, plain_s

    def group(self, size: int) -> float:
        """Run `size` sessions of `length` tokens, which begin together, to their ends; returns the speed over plain
        decoding, in which all of them end together.
        """
        self.sessions = [Session(self.length, self.num_begun + number, self.prompt_s) for number in range(size)]
        self.num_begun += size
        began_s = self.now_s
        while self.sessions:
            self._step(replace(self.at(self.now_s), sessions=len(self.sessions)))
        return self.length * self.step_s * (1 + 0.05 * size) / (self.now_s - began_s)

    def share_speculating(self, seconds: float) -> float:
        """Share of the session-steps within `seconds` that speculate."""
        counts = [
            (sum(self.gate.is_open(s.state) for s in self.sessions), len(self.sessions)) for _ in self.steps(seconds)
        ]
        return sum(on for on, _ in counts) / sum(of for _, of in counts)

    def steps(self, seconds: float) -> Iterator[tuple[float, float]]:
        """Time of each step, and of the plain steps that would give as many tokens."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            yield self._step(self.at(self.now_s))

    def _step(self, weather: Weather) -> tuple[float, float]:
        while len(self.sessions) > weather.sessions:
            self.sessions.pop()
        while len(self.sessions) < weather.sessions:
            self.sessions.append(Session(self.random.randint(1, 2 * self.length), self.num_begun, self.prompt_s))
            self.num_begun += 1
        plain_s = self.step_s * (1 + 0.05 * len(self.sessions))
        plain_s += sum(self.context_s(session.number) for session in self.sessions)
        states = [session.state for session in self.sessions]
        is_open = [self.gate.is_open(state) for state in states]
        share = sum(is_open) / len(states)
        num_tokens: list[int] = []
        working, until_s = self._at_work
        if share >= working or self.now_s >= until_s:
            working, until_s = share, self.now_s + self.lag_s
        self._at_work = (working, until_s)
        step_s = plain_s * (1 + weather.costs * working) * self.random.lognormvariate(0, self.noise)
        prompt_s = self._compute_prompts()
        step_s += prompt_s
        self.now_s += step_s
        for session, can_speculate in zip(self.sessions, is_open, strict=True):
            num_tokens.append(self._decode(session, weather, can_speculate))
        if all(state is not None for state in states):
            self.gate.observe_turn(
                states,
                num_tokens=num_tokens,
                turn_s=step_s,
                now_s=self.now_s,
                prompt_s=prompt_s,
                waiting=[state for state in states if state is not None],
            )
        self.sessions = [session for session in self.sessions if session.left > 0]
        return step_s, sum(num_tokens) / len(states) * plain_s

    def _compute_prompts(self) -> float:
        """Compute one chunk of a prompt, for the first session that needs it; returns its seconds."""
        for session in self.sessions:
            if session.prompt_s and session.state is not None and self.gate.is_open(session.state):
                chunk_s = min(_CHUNK_S, session.prompt_s)
                session.prompt_s -= chunk_s
                self.gate.invested(session.state, chunk_s)
                return chunk_s
        return 0.0

    def _decode(self, session: Session, weather: Weather, can_speculate: bool) -> int:
        if session.state is None:
            session.state = self.gate.admit(self.kind_of(session.number), self.now_s)
            session.left -= 1
            return 1
        num_accepted, has_proposal = 0, False
        if not can_speculate:
            session.catch_up = 3
        elif session.prompt_s:
            pass
        elif session.catch_up:
            session.catch_up -= 1
        elif weather.answers:
            has_proposal = True
            mean = weather.accepts if self.accepts_of is None else self.accepts_of(session.number, self.now_s)
            rate = mean / (1 + mean)
            while num_accepted < 7 and self.random.random() < rate:
                num_accepted += 1
        self.gate.stepped(session.state, num_accepted, has_proposal, self.now_s)
        session.left -= 1 + num_accepted
        return 1 + num_accepted
