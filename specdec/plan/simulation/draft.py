"""A draft's share for one target: chains of guesses that grow by a token per step, under the draft's own bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from specdec.drafting.role.growth import GrowthPolicy
from specdec.v1 import common_pb2 as pb

VOCABULARY = 1024
_CHUNK_TOKENS = 512
"""Tokens of prompts in a step, at most (`max_batch_tokens`)."""
_SURE = 255
"""Byte of the score 1."""


def token_at(position: int) -> int:
    """The target's token at a position; the values say nothing."""
    return position * 31 % VOCABULARY


@dataclass(slots=True)
class Chain:
    """A session as the draft knows it: its committed tokens, and a chain of guesses below them."""

    position: int
    """Number of committed tokens."""
    are_right: list[bool] = field(default_factory=list)
    num_unsent: int = 0
    is_suspended: bool = False
    credit: int | None = None
    """Tokens per step that the target last found worth verifying."""

    @property
    def is_on_path(self) -> bool:
        """Whether a further guess can be right."""
        return not self.are_right or self.are_right[-1]


@dataclass(slots=True, kw_only=True)
class SimulatedDraft:
    """Chains of a target's sessions, and how they grow. It keeps no time: `pair.py` does.

    A guess at depth d is right with probability `acceptance[d - 1]` if all before it are, deeper ones as the last.
    """

    acceptance: Sequence[float]
    growth: GrowthPolicy
    rng: random.Random
    chains: dict[str, Chain] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    """Tokens of prompts that are not computed, by session; a session has its prompt here or a chain."""

    def open(self, session_id: str, prompt_tokens: int) -> None:
        """A session comes with its prompt."""
        self.prompts[session_id] = prompt_tokens

    def close(self, session_id: str) -> None:
        """A session has ended."""
        self.prompts.pop(session_id, None)
        self.chains.pop(session_id, None)

    def take_chunk(self) -> int:
        """Take the tokens of prompts that the next step computes; returns their number."""
        num_rows = 0
        for session_id, left in self.prompts.items():
            part = min(left, _CHUNK_TOKENS - num_rows)
            num_rows += part
            self.prompts[session_id] = left - part
        return num_rows

    def begin_chains(self, position: Callable[[str], int]) -> None:
        """Prompts are computed: their sessions' chains begin at `position`, where the target is by now."""
        for session_id in [each for each, left in self.prompts.items() if not left]:
            del self.prompts[session_id]
            self.chains[session_id] = Chain(position(session_id))

    def score(self, depth: int) -> float:
        """The draft's estimate for a node at a depth: its acceptance."""
        return self.acceptance[min(depth, len(self.acceptance)) - 1]

    def growing(self) -> list[str]:
        """Ids of the sessions whose chains the next step extends."""
        return [session_id for session_id, chain in self.chains.items() if self._grows(chain)]

    def grow(self, session_ids: Iterable[str]) -> list[str]:
        """Extend chains by a guess each, unless they were suspended or closed meanwhile; returns the extended ones."""
        grown = []
        for session_id in session_ids:
            chain = self.chains.get(session_id)
            if chain is not None and self._grows(chain):
                depth = len(chain.are_right) + 1
                chain.are_right.append(chain.is_on_path and self.rng.random() < self.score(depth))
                chain.num_unsent += 1
                grown.append(session_id)
        return grown

    def due(self, session_id: str) -> bool:
        """Whether a session's unsent guesses are sent now."""
        chain = self.chains[session_id]
        if chain.is_suspended or not chain.num_unsent:
            return False
        return not self._grows(chain) or self.growth.is_worth_sending(chain.num_unsent)

    def proposal(self, session_id: str, draft_us: int) -> pb.Proposal:
        """The proposal of a whole chain; `draft_us`: microseconds of a step."""
        chain = self.chains[session_id]
        chain.num_unsent = 0
        tokens = [
            (token_at(chain.position + depth) + (not is_right)) % VOCABULARY
            for depth, is_right in enumerate(chain.are_right)
        ]
        return pb.Proposal(
            start_position=chain.position,
            token_ids=tokens,
            scores=bytes(round(self.score(depth) * _SURE) for depth in range(1, len(tokens) + 1)),
            draft_us=draft_us * len(tokens),
            path_length=len(tokens),
            is_complete=not self._grows(chain),
        )

    def commit(self, session_id: str, position: int, *, is_suspended: bool, credit: int) -> None:
        """The target has committed the tokens before `position`: keep the guesses that go on from there."""
        chain = self.chains.get(session_id)
        if chain is None or position < chain.position:
            return
        num_new = position - chain.position
        is_followed = len(chain.are_right) >= num_new and all(chain.are_right[:num_new])
        chain.are_right = chain.are_right[num_new:] if is_followed else []
        chain.num_unsent = min(chain.num_unsent, len(chain.are_right))
        chain.position, chain.is_suspended, chain.credit = position, is_suspended, credit
        if is_suspended:
            chain.are_right.clear()

    def _grows(self, chain: Chain) -> bool:
        depth = len(chain.are_right)
        path_score = _product(self.score, depth)
        return not chain.is_suspended and self.growth.grows(depth, path_score, depth, chain.credit)


def _product(score: Callable[[int], float], depth: int) -> float:
    path_score = 1.0
    for each in range(1, depth + 1):
        path_score *= score(each)
    return path_score
