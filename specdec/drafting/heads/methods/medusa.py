"""Medusa (arXiv:2401.10774): heads side by side over the target's last hidden state, each for one depth.

    z = the target's last hidden state at token t for each layer: z = z + silu(W z + b) logits of head i = U_i z, of
    token t + 2 + i    (the target itself gives token t + 1)

Two formats of files: the authors' (`{i}.{j}.linear.weight`, `{i}.{layers}.weight`), and vLLM's former one
(`blocks.{i}.layers.{j}.weight`, `lm_heads.{i}.weight`, `token_map`). The tensors, not the config, tell the number of
heads and layers, since published configs are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from specdec.config.drafter_options import MedusaOptions
from specdec.drafting.heads.checkpoint import HeadFiles, HeadRefused, fill, renamed
from specdec.drafting.heads.drawing import Choices, warm_up, without_noise
from specdec.drafting.heads.session import HeadAsk, HeadSession, StatelessHead
from specdec.drafting.heads.slots import choose_slots, draw_slots
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.heads.vocabulary import DraftVocabulary, checked_map
from specdec.drafting.interface import Capabilities, Context, Offer
from specdec.engine.tap import FINAL

CAPABILITIES = Capabilities(needs_hidden_states=True)


class ResidualBlock(nn.Module):
    """z + silu(W z + b)."""

    def __init__(self, size: int, *, has_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=has_bias)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Rows [T, H] to [T, H]."""
        out: torch.Tensor = z + functional.silu(self.linear(z))
        return out


class MedusaModel(nn.ModuleList):
    """The heads, named as in the authors' files."""

    def __init__(self, num_heads: int, num_layers: int, size: int, draft_size: int, *, has_bias: bool = True) -> None:
        blocks = [[ResidualBlock(size, has_bias=has_bias) for _ in range(num_layers)] for _ in range(num_heads)]
        super().__init__([nn.Sequential(*each, nn.Linear(size, draft_size, bias=False)) for each in blocks])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Last hidden states [T, H] to logits [T, heads, D]."""
        return torch.stack([head(states) for head in self], dim=1)


class Medusa(StatelessHead):
    """Drafts a tree for all sessions in one pass."""

    name = "medusa"
    capabilities = CAPABILITIES
    layer_ids: tuple[int, ...] = (FINAL,)

    def __init__(
        self, options: MedusaOptions, model: MedusaModel, target: HeadTarget, vocabulary: DraftVocabulary
    ) -> None:
        self.model = model
        self._target = target
        self._vocabulary = vocabulary.to(target.runner.device)
        self._depth = min(len(model), options.num_speculative_tokens or len(model))
        self._choices = sorted(options.medusa_choices or (), key=lambda path: (len(path), path))
        self._top_k = 1 + max(rank for path in self._choices for rank in path) if self._choices else options.topk

    def prepare(self) -> None:
        """See `Head`. Its few products are not captured."""
        warm_up(self._target.sampler, self._target.vocab_size, self._top_k)

    def open(self, context: Context) -> HeadSession:
        """Begin a session."""
        return HeadSession()

    def absorb(self, sessions: Sequence[HeadSession]) -> None:
        """Keep the last pending token's state only."""
        for session in sessions:
            if session.pending:
                newest = session.pending[-1]
                session.last = (newest.end - 1, newest.states[-1, 0].clone())
                session.pending = []

    @torch.inference_mode()
    def draft(self, asks: Sequence[HeadAsk]) -> list[Offer | None]:
        """See `Head`. Cost: one pass over a row per session."""
        self.absorb([ask.session for ask in asks])
        offers: list[Offer | None] = [None] * len(asks)
        known: list[tuple[int, torch.Tensor]] = []
        for i, ask in enumerate(asks):
            if ask.session.last is not None and ask.session.last[0] == ask.row.position - 2:
                known.append((i, ask.session.last[1]))
        if not known:
            return offers
        some = [asks[i] for i, _ in known]
        some = [replace(ask, row=without_noise(ask.row)) if ask.is_chain else ask for ask in some]
        logits = self.model.logits(torch.stack([state for _, state in known]))[:, : self._depth]
        logits = self._vocabulary.spread(logits.flatten(0, 1)).unflatten(0, (len(some), -1))
        sampler = self._target.sampler
        if self._choices:
            slots = choose_slots(sampler, logits, some, self._top_k)
            drawn = [self._static(ask, found) for ask, found in zip(some, slots, strict=True)]
        else:
            drawn = draw_slots(sampler, logits, some, self._top_k)
        for (i, _), offer in zip(known, drawn, strict=True):
            offers[i] = offer
        return offers

    def _static(self, ask: HeadAsk, slots: Sequence[Choices]) -> Offer | None:
        """The operator's paths of ranks (`medusa_choices`), as far as the room allows."""
        offer = Offer([], [], [])
        places: dict[tuple[int, ...], int] = {(): -1}
        for path in self._choices:
            depth, rank = len(path), path[-1]
            if depth > len(slots) or rank >= len(slots[depth - 1]) or len(offer.token_ids) >= ask.room.num_nodes:
                continue
            above = places.get(path[:-1])
            if above is None or (ask.is_chain and any(path)):
                continue
            places[path] = len(offer.token_ids)
            token, score = slots[depth - 1][rank]
            offer.token_ids.append(token)
            offer.parents.append(above)
            offer.scores.append(score)
        return offer if offer.token_ids else None


def load_medusa(files: HeadFiles, options: MedusaOptions, target: HeadTarget) -> Medusa:
    """Load the drafter. Raises HeadRefused."""
    tensors = renamed(files.tensors, lambda name: name.removeprefix("medusa_heads."))
    token_map = tensors.pop("token_map", None)
    if any(name.startswith("lm_heads.") for name in tensors):
        tensors = _authors_names(tensors, bool(files.config.get("original_lm_head", False)))
    places = [re.fullmatch(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)", name) for name in tensors]
    found = [(int(place[1]), int(place[2])) for place in places if place is not None and place[3]]
    heads = sorted({int(place[1]) for place in places if place is not None})
    if not heads:
        raise HeadRefused("tensors missing: 0.0.linear.weight, as in Medusa's files")
    num_layers = 1 + max((layer for _, layer in found), default=-1)
    last = tensors.get(f"0.{num_layers}.weight")
    if last is None:
        raise HeadRefused(f"tensors missing: 0.{num_layers}.weight")
    has_bias = "0.0.linear.bias" in tensors
    model = MedusaModel(
        1 + heads[-1], num_layers, target.runner.hidden_size, last.shape[0] if last.dim() == 2 else 0, has_bias=has_bias
    )
    fill(model, tensors)
    if token_map is not None:
        vocabulary = checked_map(token_map.long(), target.vocab_size, "token_map")
        if len(token_map) != last.shape[0]:
            raise HeadRefused(f"token_map names {len(token_map)} tokens, the heads {last.shape[0]}")
    elif last.shape[0] == target.vocab_size:
        vocabulary = DraftVocabulary(None, last.shape[0], target.vocab_size)
    else:
        raise HeadRefused(
            f"tensors of another shape: 0.{num_layers}.weight names {last.shape[0]} tokens, the target "
            f"{target.vocab_size}"
        )
    target.place(model)
    return Medusa(options, model, target, vocabulary)


def _authors_names(tensors: dict[str, torch.Tensor], is_shared: bool) -> dict[str, torch.Tensor]:
    """Tensors of vLLM's files under the authors' names. `is_shared`: all heads use the first head's last matrix."""
    blocks = [re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name) for name in tensors]
    num_layers = 1 + max((int(place[2]) for place in blocks if place is not None), default=-1)

    def rename(name: str) -> str:
        if place := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
            return f"{place[1]}.{place[2]}.linear.{place[3]}"
        if place := re.fullmatch(r"lm_heads\.(\d+)\.weight", name):
            return f"{place[1]}.{num_layers}.weight"
        return name

    result = renamed(tensors, rename)
    if is_shared:
        first = result.get(f"0.{num_layers}.weight")
        for head in {int(place[1]) for place in blocks if place is not None}:
            if first is not None:
                result.setdefault(f"{head}.{num_layers}.weight", first)
    return result
