"""A head's part of a session, and what all heads have in common: features in, trees out, for all sessions at once."""

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
    """Hidden states of tokens that are committed and computed, one after the other."""

    start: int
    """Position of the first."""
    states: torch.Tensor
    """[n, layers of the head, hidden size of the target]."""
    next_ids: list[int]
    """For each the token after it, n of them."""

    @property
    def end(self) -> int:
        """Position past the last."""
        return self.start + len(self.next_ids)


@dataclass(slots=True)
class HeadSession:
    """What a head keeps of one session. `propose` is asked of the head, for all of them at once."""

    seq: EngineSequence | None = None
    """Its tokens and blocks at the target; None before its first features."""
    pending: list[Features] = field(default_factory=list)
    """What the head has not taken in, without gaps."""
    last: tuple[int, torch.Tensor] | None = None
    """Position of the last token that it has taken in, and what it is to go on from there."""

    @property
    def num_pending_bytes(self) -> int:
        """Of hidden states that are not taken in."""
        return sum(features.states.nbytes for features in self.pending)

    def take(self, seq: EngineSequence, features: Features) -> None:
        """The target has computed more tokens; or some anew, after it has given up its blocks."""
        self.seq = seq
        if self.pending and self.pending[-1].end != features.start:
            self.pending.clear()
        self.pending.append(features)

    def propose(self, context: Context, room: Room) -> Offer | None:
        """Nothing: heads are asked by `Head.draft`."""
        return None

    def close(self, context: Context) -> None:
        """The session has ended."""
        self.pending.clear()
        self.seq = None


@dataclass(frozen=True, slots=True)
class HeadAsk:
    """A session whose next step is due."""

    session: HeadSession
    row: RowContext
    """How its next token is drawn, in rejection mode the likeliest one: each that is offered counts as certain."""
    room: Room
    is_chain: bool
    """Branches are of no use."""
    seq: EngineSequence | None = None
    """Its tokens and blocks at the target."""


class Head(Protocol):
    """A drafter over hidden states; see `specdec.drafting.interface.Drafter` for what is the same.

    Its calls come in this order: `prepare`, where nothing is served yet; `forget` and `copied` as the target writes,
    features for its sessions by `HeadSession.take`, `absorb` for those that have many, `draft` before a step.
    """

    name: str
    capabilities: Capabilities
    layer_ids: tuple[int, ...]
    """What it reads of the target, by the ids of `specdec.engine.tap`; features have these in this order."""

    def open(self, context: Context) -> HeadSession:
        """Begin with a session."""

    def prepare(self) -> None:
        """Do what can be done before the first request: nothing steps meanwhile, as it may take seconds."""

    def forget(self, seq: EngineSequence, start: int, end: int) -> None:
        """The target has written its slots [start, end) of a sequence, tokens and nodes."""

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The target has copied blocks."""

    def absorb(self, sessions: Sequence[HeadSession]) -> None:
        """Take in what is pending."""

    def draft(self, asks: Sequence[HeadAsk]) -> list[Offer | None]:
        """A tree for each session, below its last committed token; None where nothing is known of that."""


class StatelessHead:
    """What a head without keys and values has in common with the others: nothing to forget."""

    def prepare(self) -> None:
        """There is nothing to be done."""

    def forget(self, seq: EngineSequence, start: int, end: int) -> None:
        """There are no slots."""

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """There are no blocks."""
