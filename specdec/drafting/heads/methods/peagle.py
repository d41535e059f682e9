"""P-EAGLE (arXiv:2602.01469): EAGLE-3's modules draft all depths in one pass.

The first token comes from the last committed token's entry, as in EAGLE-3. Later entries use a mask token in place of
the unknown token, and `mask_hidden` in place of the target's hidden states. Each reads the entries of committed tokens
and of the masks before it. The choices of a depth do not depend on the tokens above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from specdec.drafting.heads.cache import NUM_SCRATCH_SLOTS, HeadCache, LaidOut, Rows
from specdec.drafting.heads.cached import Base, CachedHead, TakenIn
from specdec.drafting.heads.checkpoint import HeadFiles, HeadRefused
from specdec.drafting.heads.config import HeadConfig
from specdec.drafting.heads.drawing import without_noise
from specdec.drafting.heads.methods.eagle3 import Eagle3Model, load_eagle3
from specdec.drafting.heads.parts import Attend
from specdec.drafting.heads.passes import HeadPass, Projection
from specdec.drafting.heads.session import HeadAsk
from specdec.drafting.heads.slots import draw_slots
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.heads.vocabulary import DraftVocabulary
from specdec.drafting.interface import Capabilities, Offer

CAPABILITIES = Capabilities(needs_hidden_states=True)


class PEagle(CachedHead):
    """One pass over committed tokens, then one over the masks of all sessions."""

    def __init__(
        self,
        layer_ids: tuple[int, ...],
        model: Eagle3Model,
        mask_hidden: torch.Tensor,
        mask_token_id: int,
        target: HeadTarget,
        cache: HeadCache,
        vocabulary: DraftVocabulary,
        *,
        depth: int,
        top_k: int,
    ) -> None:
        """`mask_hidden` [layers, Ht]: in place of the target's hidden states."""
        super().__init__("peagle", CAPABILITIES, layer_ids, target, cache, vocabulary)
        self.model = model
        self._mask_token_id = mask_token_id
        self._mask_state = model.fuse(mask_hidden[None])  # [1, H]
        self._depth, self.top_k = depth, top_k
        taps, vocabulary = (len(layer_ids), target.runner.hidden_size), self.vocabulary

        def entered(states: torch.Tensor, rows: LaidOut, attend: Attend) -> torch.Tensor:
            return model.run(model.fuse(states), rows.token_ids, rows.positions, attend)

        def masked(states: torch.Tensor, rows: LaidOut, attend: Attend) -> torch.Tensor:
            return model.run(states, rows.token_ids, rows.positions, attend)

        self._entering = HeadPass("entering", taps, entered)
        self._masks = HeadPass("masks", (model.width,), masked)
        self._logits = Projection("logits", (model.width,), lambda rows: vocabulary.spread(model.logits(rows)))
        self.kinds = self._entering, self._masks, self._logits

    def take_in(self, taken: TakenIn) -> torch.Tensor:
        """See `CachedHead`."""
        return self.passes.run(self._entering, taken.states, taken.rows)

    @torch.inference_mode()
    def draft(self, asks: Sequence[HeadAsk]) -> list[Offer | None]:
        """See `Head`. Cost: two passes, whatever the depth."""
        asks = [replace(ask, row=without_noise(ask.row)) if ask.is_chain else ask for ask in asks]
        offers: list[Offer | None] = [None] * len(asks)
        at_once = max(1, NUM_SCRATCH_SLOTS // self._depth)
        known = [(i, base) for i, base in enumerate(self.bases(asks)) if base is not None]
        for first in range(0, len(known), at_once):
            some = known[first : first + at_once]
            hidden = self._hidden([base for _, base in some])  # [sessions, depth, H]
            logits = self.passes.project(self._logits, hidden.flatten(0, 1)).unflatten(0, (len(some), -1))
            drawn = draw_slots(self.target.sampler, logits, [asks[i] for i, _ in some], self.top_k)
            for (i, _), offer in zip(some, drawn, strict=True):
                offers[i] = offer
        return offers

    def _hidden(self, bases: Sequence[Base]) -> torch.Tensor:
        firsts = torch.stack([base.last for base in bases])[:, None]
        num_masks = self._depth - 1
        if not num_masks:
            return firsts
        rows = Rows(tables=[base.table for base in bases])
        slot = self.cache.first_scratch_slot
        for line, base in enumerate(bases):
            path: list[int] = []
            for step in range(1, num_masks + 1):
                path = [*path, slot]
                rows.slots.append(slot)
                rows.lines.append(line)
                rows.contexts.append(base.num_entries)
                rows.paths.append(path)
                rows.token_ids.append(self._mask_token_id)
                rows.positions.append(base.last_position + step)
                slot += 1
        hidden = self.passes.run(self._masks, self._mask_state.expand(len(rows), -1), self.cache.lay_out(rows))
        return torch.cat([firsts, hidden.unflatten(0, (len(bases), num_masks))], dim=1)


def load_peagle(
    files: HeadFiles, config: HeadConfig, layer_ids: tuple[int, ...], target: HeadTarget
) -> tuple[Eagle3Model, DraftVocabulary, torch.Tensor, int]:
    """Load the modules, their vocabulary, `mask_hidden` [layers, Ht] and the mask token. Raises HeadRefused."""
    tensors = dict(files.tensors)
    mask_hidden = tensors.pop("mask_hidden", None)
    width = target.runner.hidden_size
    if mask_hidden is None:
        raise HeadRefused("tensors missing: mask_hidden")
    if mask_hidden.numel() != len(layer_ids) * width:
        raise HeadRefused(
            f"tensors of another shape: mask_hidden {tuple(mask_hidden.shape)}, not {(len(layer_ids), width)}"
        )
    token = config.token_id("mask_token_id", "ptd_token_id", "pard_token")
    model, vocabulary = load_eagle3(replace(files, tensors=tensors), config, layer_ids, target)
    if token >= target.vocab_size:
        raise HeadRefused(f"config.json: mask_token_id {token} is outside the vocabulary of {target.vocab_size}")
    state = nn.Parameter(mask_hidden.reshape(len(layer_ids), width), requires_grad=False)
    return model, vocabulary, state.to(target.runner.device, target.runner.dtype), token
