"""Common to heads with keys and values: they make entries of committed tokens, which drafts read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.drafting.heads.cache import HeadCache, LaidOut, Rows
from specdec.drafting.heads.drawing import warm_up
from specdec.drafting.heads.passes import HeadPass, Projection
from specdec.drafting.heads.session import HeadAsk, HeadSession
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.heads.vocabulary import DraftVocabulary
from specdec.drafting.interface import Capabilities, Context
from specdec.engine.sequence import Sequence as EngineSequence


@dataclass(slots=True)
class TakenIn:
    """Committed tokens of several sessions, as one pass takes them in."""

    states: torch.Tensor
    """[n, layers of the head, hidden size of the target]."""
    rows: LaidOut
    """Where entries go and what each row reads. A row's token is the next token."""


@dataclass(slots=True)
class Base:
    """The entries of one session's committed tokens, which its drafted tokens read."""

    table: Sequence[int]
    num_entries: int
    last_position: int
    """Position of the last token that the head has taken in."""
    last: torch.Tensor
    """State from which drafting continues."""


class CachedHead:
    """Keeps sessions' entries in the target's blocks. Subclasses define an entry."""

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        layer_ids: tuple[int, ...],
        target: HeadTarget,
        cache: HeadCache,
        vocabulary: DraftVocabulary,
    ) -> None:
        self.name = name
        self.capabilities = capabilities
        self.layer_ids = layer_ids
        self.target = target
        self.cache = cache
        self.vocabulary = vocabulary.to(target.runner.device)
        self.passes = target.passes(cache)
        self.kinds: tuple[HeadPass | Projection, ...] = ()
        """Passes that are captured before the first request."""
        self.top_k = 1
        """Number of best tokens taken from a row."""

    def open(self, context: Context) -> HeadSession:
        """Begin a session."""
        return HeadSession()

    def prepare(self) -> None:
        """See `Head`."""
        self.passes.prepare(self.kinds)
        warm_up(self.target.sampler, self.target.vocab_size, self.top_k)

    def forget(self, seq: EngineSequence, start: int, end: int) -> None:
        """See `Head`."""
        self.cache.forget(self.cache.slots_of(seq, start, end))

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Head`."""
        self.cache.copied(pairs)

    @torch.inference_mode()
    def absorb(self, sessions: Sequence[HeadSession]) -> None:
        """Take in all pending tokens in one pass, which overwrites drafted entries in their slots."""
        rows = Rows()
        states: list[torch.Tensor] = []
        shares: list[tuple[HeadSession, int]] = []
        for session in sessions:
            seq, pending = session.seq, session.pending
            session.pending = []
            if seq is None or not pending:
                continue
            start, end = pending[0].start, pending[-1].end
            slots = self.cache.slots_of(seq, start, end)
            if len(slots) < end - start:
                session.last = None  # preempted: it will compute these tokens again
                continue
            first = self.cache.first_block(seq, start)
            base = first * self.cache.block_size
            line = len(rows.tables)
            rows.tables.append(seq.block_ids[first:])
            for position, slot in zip(range(start, end), slots, strict=True):
                rows.slots.append(slot)
                rows.lines.append(line)
                rows.contexts.append(max(0, position + 1 - base))
                rows.paths.append([] if position >= base else [slot])
            states += [features.states for features in pending]
            for features in pending:
                rows.token_ids += features.next_ids
            rows.positions += range(start, end)
            shares.append((session, len(rows) - 1))
        if not shares:
            return
        taken = TakenIn(states[0] if len(states) == 1 else torch.cat(states), self.cache.lay_out(rows))
        lasts = self.take_in(taken)
        self.cache.keep(rows.slots)
        for session, row in shares:
            session.last = (rows.positions[row], lasts[row].clone())

    def take_in(self, taken: TakenIn) -> torch.Tensor:
        """Write the entries of these tokens. Returns for each the state from which a draft would continue, [n, any]."""
        raise NotImplementedError

    def bases(self, asks: Sequence[HeadAsk]) -> list[Base | None]:
        """Take in pending tokens. Returns each session's base; None if the head has not seen its last token."""
        self.absorb([ask.session for ask in asks])
        found: list[Base | None] = []
        for ask in asks:
            session, last_position = ask.session, ask.row.position - 2
            seq, last = session.seq, session.last
            if seq is None or last is None or last[0] != last_position:
                found.append(None)
                continue
            first = self.cache.first_block(seq, last_position + 1)
            num_entries = max(0, last_position + 1 - first * self.cache.block_size)
            found.append(Base(seq.block_ids[first:], num_entries, last_position, last[1]))
        return found
