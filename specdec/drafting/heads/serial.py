"""Drafts as EAGLE does: each token from the head's own hidden states, level by level for all sessions at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from specdec.drafting.heads.cache import NUM_SCRATCH_SLOTS, HeadCache, LaidOut, Rows
from specdec.drafting.heads.cached import Base, CachedHead, TakenIn
from specdec.drafting.heads.drawing import Choices, after, choose, without_noise
from specdec.drafting.heads.growth import GrowingTree
from specdec.drafting.heads.parts import Attend
from specdec.drafting.heads.passes import HeadPass, Projection
from specdec.drafting.heads.session import HeadAsk
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.heads.vocabulary import DraftVocabulary
from specdec.drafting.interface import Capabilities, Offer, Room


class SerialModel(Protocol):
    """A head's modules, of width H and vocabulary size D. No operation may depend on data."""

    @property
    def width(self) -> int:
        """H."""

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [T, layers, Ht] as the head's own [T, H]."""

    def run(
        self, states: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Hidden states [T, H] from states [T, H] at these positions and the next tokens [T]."""

    def carry(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] of drafted tokens as input states, as `fuse` gives for committed tokens."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, D] of the token after the next."""


@dataclass(slots=True)
class _Draft:
    """A session's tree, with its nodes' hidden states and slots."""

    ask: HeadAsk
    base: Base
    tree: GrowingTree
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    """Hidden state by node; -1 is the last committed token."""
    slots: dict[int, list[int]] = field(default_factory=dict)
    """Slots of the path to each node."""


class SerialHead(CachedHead):
    """Grows chains or trees, one pass per level."""

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        layer_ids: tuple[int, ...],
        model: SerialModel,
        target: HeadTarget,
        cache: HeadCache,
        vocabulary: DraftVocabulary,
        *,
        depth: int,
        top_k: int,
        num_nodes: int | None,
    ) -> None:
        """`depth`: levels of `top_k` nodes each; `num_nodes`: best nodes offered (None: as the room allows)."""
        super().__init__(name, capabilities, layer_ids, target, cache, vocabulary)
        self.model = model
        taps, width, vocabulary = (len(layer_ids), target.runner.hidden_size), model.width, self.vocabulary

        def entered(states: torch.Tensor, rows: LaidOut, attend: Attend) -> torch.Tensor:
            return model.run(model.fuse(states), rows.token_ids, rows.positions, attend)

        def carried(states: torch.Tensor, rows: LaidOut, attend: Attend) -> torch.Tensor:
            return model.run(model.carry(states), rows.token_ids, rows.positions, attend)

        self._entering = HeadPass("entering", taps, entered)
        self._level = HeadPass("level", (width,), carried)
        self._logits = Projection("logits", (width,), lambda hidden: vocabulary.spread(model.logits(hidden)))
        self.kinds = self._entering, self._level, self._logits
        self.top_k, self._depth, self._num_nodes = top_k, depth, num_nodes

    def take_in(self, taken: TakenIn) -> torch.Tensor:
        """Write entries of each token's features and the next token."""
        return self.passes.run(self._entering, taken.states, taken.rows)

    @torch.inference_mode()
    def draft(self, asks: Sequence[HeadAsk]) -> list[Offer | None]:
        """See `Head`. Cost: a pass over a row per session, then one per level over `top_k` rows per session."""
        asks = [replace(ask, row=without_noise(ask.row)) if ask.is_chain else ask for ask in asks]
        drafts: dict[int, _Draft] = {}
        for index, (ask, base) in enumerate(zip(asks, self.bases(asks), strict=True)):
            if base is not None:
                tree = GrowingTree(self.room(ask), 1 if ask.is_chain else self.top_k)
                drafts[index] = _Draft(ask, base, tree, {-1: base.last}, {-1: []})
        if drafts:
            self._grow(list(drafts.values()))
        return [drafts[index].tree.offer() if index in drafts else None for index in range(len(asks))]

    def room(self, ask: HeadAsk) -> Room:
        """Bounds on a tree's nodes and depth."""
        num_nodes = ask.room.num_nodes if self._num_nodes is None else min(ask.room.num_nodes, self._num_nodes)
        return Room(num_nodes, min(ask.room.depth, self._depth))

    def _grow(self, drafts: list[_Draft]) -> None:
        next_slot, end = self.cache.first_scratch_slot, self.cache.first_scratch_slot + NUM_SCRATCH_SLOTS
        while growing := [draft for draft in drafts if draft.tree.grows]:
            level = [(draft, node) for draft in growing for node in draft.tree.beam]
            if growing[0].tree.depth:
                if next_slot + len(level) > end:
                    return
                self._compute(level, growing, next_slot)
                next_slot += len(level)
            choices = iter(self._choices(level))
            for draft in growing:
                draft.tree.add_level([next(choices) for _ in draft.tree.beam])

    def _choices(self, level: Sequence[tuple[_Draft, int]]) -> list[Choices]:
        hidden = torch.stack([draft.hidden[node] for draft, node in level])
        logits = self.passes.project(self._logits, hidden)
        rows = [after(draft.ask.row, draft.tree.path(node)) for draft, node in level]
        return choose(self.target.sampler, logits, rows, self.top_k)

    def _compute(self, level: Sequence[tuple[_Draft, int]], drafts: Sequence[_Draft], first_slot: int) -> None:
        """Compute hidden states of nodes, each over its own path."""
        rows = Rows(tables=[draft.base.table for draft in drafts])
        lines = {id(draft): line for line, draft in enumerate(drafts)}
        states: list[torch.Tensor] = []
        for index, (draft, node) in enumerate(level):
            grown = draft.tree.nodes[node]
            slot = first_slot + index
            draft.slots[node] = [*draft.slots[grown.parent], slot]
            rows.slots.append(slot)
            rows.lines.append(lines[id(draft)])
            rows.contexts.append(draft.base.num_entries)
            rows.paths.append(draft.slots[node])
            states.append(draft.hidden[grown.parent])
            rows.token_ids.append(grown.token_id)
            rows.positions.append(draft.base.last_position + len(grown.path))
        hidden = self.passes.run(self._level, torch.stack(states), self.cache.lay_out(rows))
        for (draft, node), state in zip(level, hidden, strict=True):
            draft.hidden[node] = state
