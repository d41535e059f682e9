"""The interface of heads: features of committed tokens in, trees out, for all sessions at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from specdec.drafting.interface import Capabilities, Context, Offer, Room
from specdec.engine.sampling.sampler import RowContext
from specdec.engine.sequence import Sequence as EngineSequence


@dataclass(slots=True)
class Features:
    """Hidden states of consecutive committed tokens."""

    start: int
    """Position of the first token."""
    states: torch.Tensor
    """[n, layers of the head, hidden size of the target]."""
    next_ids: list[int]
    """[n] The token after each."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.next_ids)


@dataclass(slots=True)
class HeadSession:
    """A head's state of one session."""

    seq: EngineSequence | None = None
    """The target's sequence; None before its first features."""
    pending: list[Features] = field(default_factory=list)
    """Features that the head has not taken in, without gaps."""
    last: tuple[int, torch.Tensor] | None = None
    """Position of the last token that it has taken in, and the state from which a draft continues."""

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of pending hidden states."""
        return sum(features.states.nbytes for features in self.pending)

    def take(self, seq: EngineSequence, features: Features) -> None:
        """Add features of newly computed tokens, or of tokens computed again after preemption."""
        self.seq = seq
        if self.pending and self.pending[-1].end != features.start:
            self.pending.clear()
        self.pending.append(features)

    def propose(self, context: Context, room: Room) -> Offer | None:
        """None: `Head.draft` drafts for all sessions at once."""
        return None

    def close(self, context: Context) -> None:
        """The session has ended."""
        self.pending.clear()
        self.seq = None


@dataclass(frozen=True, slots=True)
class HeadAsk:
    """A session to draft for."""

    session: HeadSession
    row: RowContext
    """How its next token is sampled."""
    room: Room
    is_chain: bool
    """Whether only a chain can be used."""
    seq: EngineSequence | None = None
    """The target's sequence."""


class Head(Protocol):
    """A drafter over hidden states; see also `specdec.drafting.interface.Drafter`.

    Order of calls: `prepare` before serving; `forget` and `copied` as the target writes; features by
    `HeadSession.take`; `absorb` for sessions with many features; `draft` before a step.
    """

    name: str
    capabilities: Capabilities
    layer_ids: tuple[int, ...]
    """The target's layers that it reads (ids of `specdec.engine.tap`), in the order of its features."""

    def open(self, context: Context) -> HeadSession:
        """Begin a session."""

    def prepare(self) -> None:
        """Compile and capture before the first request; may take seconds."""

    def forget(self, seq: EngineSequence, start: int, end: int) -> None:
        """The target has overwritten slots [start, end) of a sequence, tokens and nodes."""

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The target has copied blocks."""

    def absorb(self, sessions: Sequence[HeadSession]) -> None:
        """Take in pending features."""

    def draft(self, asks: Sequence[HeadAsk]) -> list[Offer | None]:
        """A tree for each session below its last committed token; None if the head has not seen that token."""


class StatelessHead:
    """A head without keys and values."""

    def prepare(self) -> None:
        """Nothing to prepare."""

    def forget(self, seq: EngineSequence, start: int, end: int) -> None:
        """Nothing to forget."""

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing to copy."""
