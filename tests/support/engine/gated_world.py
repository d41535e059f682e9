"""A target, its drafts and its clients as numbers: what the gate sees of them, by a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.policy.gate_state import GateState

_CHUNK_S = 0.02
"""Of a prompt between two steps."""


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
    prompt_s: float
    """Of the target's time that its draft still needs for its prompt."""
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
    context_s: Callable[[int], float] = lambda _: 0.0
    """Of a plain step, for the context of a session by its number."""
    prompt_s: float = 0.0
    """Of the target's time a draft computes a session's prompt, before it proposes anything."""
    lag_s: float = 0.0
    """For so long a draft works on after it was told to stop."""
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.gate.computes_prompts = self.prompt_s > 0
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
        """Of one chunk, for the first session that wants it. Returns what that takes."""
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
