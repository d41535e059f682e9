"""A target, its drafts and its clients as numbers: what the gate sees of them, by a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from target_service.policy.gate import SpeculationGate
from target_service.policy.gate_state import GateState


@dataclass(frozen=True)
class Weather:
    """How things are at a moment."""

    accepts: float = 1.0
    """Mean accepted tokens per step of a session that speculates: whatever it is, up to seven at once."""
    costs: float = 0.2
    """How much longer a step takes if all speculate."""
    sessions: int = 1
    answers: bool = True
    """Whether drafts propose at all."""


@dataclass
class Session:
    left: int
    number: int
    state: GateState | None = None
    catch_up: int = 0


@dataclass
class World:
    """Decodes for ever; sessions end and others take their places."""

    at: Callable[[float], Weather]
    length: int = 400
    seed: int = 0
    gate: SpeculationGate = field(default_factory=SpeculationGate)
    accepts_of: Callable[[int, float], float] | None = None
    """Of a session by its number, and of the time."""
    kind_of: Callable[[int], str] = lambda _: "greedy"
    """Of a session by its number."""
    noise: float = 0.05
    step_s: float = 0.01
    """Of a plain step without sessions."""
    lag_s: float = 0.0
    """For so long a draft works on after it was told to stop."""
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.sessions: list[Session] = []
        self.num_begun = 0
        self._at_work = (0.0, 0.0)
        """What share of drafts is, and until when."""

    def run(self, seconds: float) -> tuple[float, float]:
        """Seconds that it took, and those that plain decoding would have taken for the same tokens."""
        took_s = plain_s = 0.0
        for step_s, plain in self.steps(seconds):
            took_s += step_s
            plain_s += plain
        return took_s, plain_s

    def share_speculating(self, seconds: float) -> float:
        """Of session-steps within so many seconds."""
        counts = [
            (sum(self.gate.is_open(s.state) for s in self.sessions), len(self.sessions)) for _ in self.steps(seconds)
        ]
        return sum(on for on, _ in counts) / sum(of for _, of in counts)

    def steps(self, seconds: float) -> Iterator[tuple[float, float]]:
        """Each step: the time it took, and the time of plain steps that would have given as many tokens."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            yield self._step(self.at(self.now_s))

    def _step(self, weather: Weather) -> tuple[float, float]:
        while len(self.sessions) > weather.sessions:
            self.sessions.pop()
        while len(self.sessions) < weather.sessions:
            self.sessions.append(Session(self.random.randint(1, 2 * self.length), self.num_begun))
            self.num_begun += 1
        plain_s = self.step_s * (1 + 0.05 * len(self.sessions))
        states = [session.state for session in self.sessions]
        is_open = [self.gate.is_open(state) for state in states]
        share = sum(is_open) / len(states)
        num_tokens: list[int] = []
        working, until_s = self._at_work
        if share >= working or self.now_s >= until_s:
            working, until_s = share, self.now_s + self.lag_s
        self._at_work = (working, until_s)
        step_s = plain_s * (1 + weather.costs * working) * self.random.lognormvariate(0, self.noise)
        self.now_s += step_s
        for session, can_speculate in zip(self.sessions, is_open, strict=True):
            num_tokens.append(self._decode(session, weather, can_speculate))
        if all(state is not None for state in states):
            self.gate.observe_turn(
                states,
                num_tokens=num_tokens,
                num_open=len(states),
                turn_s=step_s,
                now_s=self.now_s,
                waiting=[state for state in states if state is not None],
            )
        self.sessions = [session for session in self.sessions if session.left > 0]
        return step_s, sum(num_tokens) / len(states) * plain_s

    def _decode(self, session: Session, weather: Weather, can_speculate: bool) -> int:
        if session.state is None:
            session.state = self.gate.admit(self.kind_of(session.number), self.now_s)
            session.left -= 1
            return 1
        num_accepted, has_proposal = 0, False
        if not can_speculate:
            session.catch_up = 3
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
