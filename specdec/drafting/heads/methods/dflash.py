"""DFlash (arXiv:2602.06036): drafts a block of mask tokens after the last committed token in one bidirectional pass.

    context:  c_t = rms(fc taps_t; hidden_norm) of every committed token; each layer keeps its keys and values of c_t
    block:    embeddings of the last committed token (the anchor) and of masks, from the anchor's position on; each
              layer attends over the context and the whole block
    logits of slot k = lm_head rms(x_k; norm), of the token k after the anchor; with `sample_from_anchor` of the next

A context entry does not depend on the next token, so that shared prefix blocks fit any continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specdec.drafting.heads.cache import NUM_SCRATCH_SLOTS, HeadCache, LaidOut, Rows
from specdec.drafting.heads.cached import Base, CachedHead, TakenIn
from specdec.drafting.heads.checkpoint import UNUSED, HeadFiles, HeadRefused, fill
from specdec.drafting.heads.config import HeadConfig
from specdec.drafting.heads.drawing import without_noise
from specdec.drafting.heads.parts import Attend, Layer, RmsNorm, Rotary
from specdec.drafting.heads.passes import HeadPass, Projection
from specdec.drafting.heads.session import HeadAsk
from specdec.drafting.heads.slots import draw_slots
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.heads.vocabulary import DraftVocabulary, read_vocabulary
from specdec.drafting.interface import Capabilities, Offer

CAPABILITIES = Capabilities(needs_hidden_states=True)
_NOT_SUPPORTED = ("use_swa", "attention_sink_bias", "attention_value_scale", "conv_kernel_size", "selector_rank")


class DFlashModel(nn.Module):
    """The modules, named as in the checkpoint."""

    def __init__(
        self, config: HeadConfig, num_taps: int, target_size: int, vocab_size: int, draft_size: int, num_positions: int
    ) -> None:
        super().__init__()
        layers = config.layers
        size, epsilon = layers.hidden_size, layers.rms_norm_eps
        self.embed_tokens = nn.Embedding(vocab_size, size)
        self.fc = nn.Linear(num_taps * target_size, size, bias=False)
        self.hidden_norm = RmsNorm(size, epsilon)
        self.layers = nn.ModuleList([Layer(layers, has_head_norms=True) for _ in range(layers.num_hidden_layers)])
        self.norm = RmsNorm(size, epsilon)
        self.lm_head = nn.Linear(size, draft_size, bias=False)
        self._rotary = Rotary(layers, num_positions)

    def _apply(self, *args: Any, **kwargs: Any) -> DFlashModel:
        super()._apply(*args, **kwargs)
        self._rotary.to(self.norm.weight.device)
        return self

    def context(self, states: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [T, layers, Ht] to the context [T, H] that each layer makes entries of."""
        fused: torch.Tensor = self.hidden_norm(self.fc(states.flatten(1)))
        return fused

    def entries(self, layer: int, context: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, kv heads, d] of one layer."""
        chosen: Layer = self.layers[layer]  # type: ignore[assignment]
        return chosen.self_attn.keys_values(context, self._rotary, positions)

    def run(self, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Blocks of embeddings [T, H] to normed hidden states [T, H], which `lm_head` reads."""
        x = embedded
        for index, layer in enumerate(self.layers):
            x = layer(x, self._rotary, positions, index, attend)
        normed: torch.Tensor = self.norm(x)
        return normed


class DFlash(CachedHead):
    """Drafts the blocks of all sessions in one pass."""

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        config: HeadConfig,
        layer_ids: tuple[int, ...],
        model: DFlashModel,
        mask: torch.Tensor,
        target: HeadTarget,
        cache: HeadCache,
        vocabulary: DraftVocabulary,
        *,
        depth: int | None,
        top_k: int,
    ) -> None:
        """`mask` [H]: embedding of an unknown token; `depth`: greatest depth of drafts (None: the whole block)."""
        super().__init__(name, capabilities, layer_ids, target, cache, vocabulary)
        self.model = model
        self._mask = mask
        self._block = config.block_size
        self._is_causal = config.flag("causal", default=False)
        from_anchor = config.flag("sample_from_anchor", default=name == "dspark")
        self._first = 0 if from_anchor else 1
        self._depth = self._block - self._first if depth is None else min(depth, self._block - self._first)
        self.top_k = top_k
        taps, width = (len(layer_ids), target.runner.hidden_size), model.lm_head.in_features
        vocabulary = self.vocabulary

        def entered(states: torch.Tensor, rows: LaidOut, attend: Attend) -> torch.Tensor:
            context = model.context(states)
            for layer in range(len(model.layers)):
                cache.write(layer, rows.slots, *model.entries(layer, context, rows.positions))
            return rows.token_ids

        self._entering = HeadPass("entering", taps, entered)
        self._blocks = HeadPass(
            "blocks", (width,), lambda states, rows, attend: model.run(states, rows.positions, attend)
        )
        self._logits = Projection("logits", (width,), lambda rows: vocabulary.spread(model.lm_head(rows)))
        self.kinds = self._entering, self._blocks

    def take_in(self, taken: TakenIn) -> torch.Tensor:
        """Write entries of the tokens' features. A draft continues from the next token."""
        return self.passes.run(self._entering, taken.states, taken.rows)

    @torch.inference_mode()
    def draft(self, asks: Sequence[HeadAsk]) -> list[Offer | None]:
        """See `Head`. Cost: one pass over a block per session, whatever the depth."""
        asks = [replace(ask, row=without_noise(ask.row)) if ask.is_chain else ask for ask in asks]
        offers: list[Offer | None] = [None] * len(asks)
        at_once = max(1, NUM_SCRATCH_SLOTS // self._block)
        known = [(i, base) for i, base in enumerate(self.bases(asks)) if base is not None]
        for first in range(0, len(known), at_once):
            some = known[first : first + at_once]
            hidden = self._hidden([base for _, base in some])[:, self._first : self._first + self._depth]
            anchors = torch.stack([base.last for _, base in some])
            drawn = self.drawn([asks[i] for i, _ in some], hidden, anchors)
            for (i, _), offer in zip(some, drawn, strict=True):
                offers[i] = offer
        return offers

    def drawn(self, asks: Sequence[HeadAsk], hidden: torch.Tensor, anchors: torch.Tensor) -> list[Offer | None]:
        """Trees from hidden states [sessions, depth, H] of the drafted slots.

        `anchors` [sessions] are the last committed tokens.
        """
        logits = self.passes.project(self._logits, hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return draw_slots(self.target.sampler, logits, asks, self.top_k)

    def _hidden(self, bases: Sequence[Base]) -> torch.Tensor:
        rows = Rows(tables=[base.table for base in bases])
        slot = self.cache.first_scratch_slot
        for line, base in enumerate(bases):
            block = list(range(slot, slot + self._block))
            slot += self._block
            rows.slots += block
            rows.lines += [line] * self._block
            rows.contexts += [base.num_entries] * self._block
            rows.paths += [block[: index + 1] if self._is_causal else block for index in range(self._block)]
            rows.token_ids += [0] * self._block  # a block's input is in its states
            rows.positions += range(base.last_position + 1, base.last_position + 1 + self._block)
        embedded = self._mask.expand(len(bases), self._block, -1).clone()
        embedded[:, 0] = self.model.embed_tokens(torch.stack([base.last for base in bases]))
        hidden = self.passes.run(self._blocks, embedded.flatten(0, 1), self.cache.lay_out(rows))
        return hidden.unflatten(0, (len(bases), self._block))


def load_dflash(
    files: HeadFiles, config: HeadConfig, layer_ids: tuple[int, ...], target: HeadTarget
) -> tuple[DFlashModel, DraftVocabulary, torch.Tensor]:
    """Load the modules, their vocabulary and the embedding [H] of a mask. Raises HeadRefused."""
    check_supported(config)
    tensors = {name.removeprefix("model."): value for name, value in files.tensors.items()}
    vocab_size, width = target.vocab_size, config.layers.hidden_size
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target.lm_head(width)
        if "d2t" in tensors:  # a reduced vocabulary over the target's own head
            draft_size = tensors["d2t"].shape[0]
            ids = tensors["d2t"].long() + torch.arange(draft_size)
            if int(ids.min()) >= 0 and int(ids.max()) < vocab_size:
                tensors["lm_head.weight"] = tensors["lm_head.weight"][ids]
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = target.embedding(width)
    mask_embedding = tensors.pop("mask_embedding", None)
    draft_size = tensors["lm_head.weight"].shape[0]
    vocabulary = read_vocabulary(tensors, draft_size, vocab_size)
    model = DFlashModel(config, len(layer_ids), target.runner.hidden_size, vocab_size, draft_size, target.num_positions)
    fill(model, tensors, unused=UNUSED)
    if mask_embedding is None:
        token = config.token_id("mask_token_id")
        if token >= vocab_size:
            raise HeadRefused(f"config.json: mask_token_id {token} is outside the vocabulary of {vocab_size}")
        mask = model.embed_tokens.weight[token].detach().clone()
    else:
        if mask_embedding.numel() != width:
            raise HeadRefused(f"tensors of another shape: mask_embedding {tuple(mask_embedding.shape)}, not {(width,)}")
        mask = mask_embedding.reshape(width)
    target.place(model)
    return model, vocabulary, mask.to(target.runner.device, target.runner.dtype)


def check_supported(config: HeadConfig) -> None:
    """Raise HeadRefused for config options that are not supported."""
    for name in _NOT_SUPPORTED:
        if config.values.get(name):
            raise HeadRefused(f"config.json: {name} is not supported")
    inner = config.values.get("transformer_layer_config", config.values)
    if isinstance(inner, dict) and "sliding_attention" in (inner.get("layer_types") or ()):
        raise HeadRefused("config.json: layers with sliding attention are not supported")
