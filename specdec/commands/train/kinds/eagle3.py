"""Training of an EAGLE-3 head, which also learns on its own states, as many tokens ahead as it will draft.

A row is a token j with the one after it, and drafts the token at j + 2. At depth 0 it reads the target's states of
token j; at depth k it reads the head's own state of token j - 1 at depth k - 1. It attends to the entries of the
target's states up to j - k, and to its own entries after that. This is the same input as in serving.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specdec.commands.train.checkpoint import write_checkpoint
from specdec.commands.train.kinds.speculators import head_config, vocabulary_tensors
from specdec.commands.train.recipe import Recipe
from specdec.commands.train.recorded.states import TextBatch
from specdec.commands.train.trainee import DraftRows, Guesses, TargetParts, chosen_rows
from specdec.drafting.heads.config import read_config
from specdec.drafting.heads.methods.eagle3 import Eagle3Model
from specdec.drafting.heads.parts import Attend

_SMALL = 0.1
"""Scale of the new layer's first output, relative to that of a usual initialisation."""


class DepthAttention:
    """Attention of `num_texts` texts with `length` rows each over the entries of all previous depths."""

    def __init__(self, num_texts: int, length: int, device: torch.device) -> None:
        self._shape = (num_texts, length)
        self._keys: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
        rows = torch.arange(length, device=device)
        self._distance = rows[:, None] - rows[None, :]

    def next_depth(self) -> Attend:
        """Attention of the next depth; its first `depth` rows attend to themselves only and have no meaning."""
        depth = len(self._keys)
        self._keys.append({})

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            group = query.shape[1] // key.shape[1]
            q = query.unflatten(0, self._shape)
            k, v = (each.repeat_interleave(group, 1).unflatten(0, self._shape) for each in (key, value))
            self._keys[depth][layer] = (k, v)
            first_keys, first_values = self._keys[0][layer]
            scale = q.shape[-1] ** -0.5
            scores = torch.einsum("bqhd,bkhd->bhqk", q, first_keys) * scale
            scores = scores.masked_fill(self._distance < depth, -torch.inf)
            own = [
                (_down(keys[layer][0], depth - back), _down(keys[layer][1], depth - back))
                for back, keys in enumerate(self._keys)
                if back
            ]
            more = [(q * keys).sum(-1).transpose(1, 2)[..., None] * scale for keys, _ in own]
            weights = torch.cat([scores, *more], dim=-1).softmax(-1)
            length = self._shape[1]
            attended = torch.einsum("bhqk,bkhd->bqhd", weights[..., :length], first_values)
            for place, (_, values) in enumerate(own):
                attended = attended + weights[..., length + place].transpose(1, 2)[..., None] * values
            return attended.flatten(0, 1)

        return attend


def _down(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Rows [B, T, ...] moved down by `by`, with zeros before them."""
    if by == 0:
        return rows
    return torch.cat([torch.zeros_like(rows[:, :by]), rows[:, :-by]], dim=1)


def _drafts(model: Any, hidden: torch.Tensor) -> DraftRows:
    """Drafts from states [B, N, H]."""

    def at(texts: torch.Tensor, places: torch.Tensor, columns: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        rows = model.norm(hidden[texts, places])
        return functional.linear(rows, chosen_rows(model.lm_head.weight, columns)), None

    return at


class Eagle3Trainee:
    """`Trainee` for an EAGLE-3 head that has its target's width and embedding."""

    lead = 1

    def __init__(self, recipe: Recipe, target: TargetParts, target_ids: torch.Tensor | None, sample: TextBatch) -> None:
        """`sample` gives the scale of the target's states. Weights come from torch's random state."""
        self.target_ids = target_ids
        self._recipe, self._target = recipe, target
        self._config = self._config_json()
        size = target.hidden_size
        draft_size = target.vocab_size if target_ids is None else len(target_ids)
        layer_ids = target.taps(recipe)
        model = Eagle3Model(
            read_config(self._config), len(layer_ids), size, target.vocab_size, draft_size, target.num_positions
        )
        self.module: nn.Module = model.to(target.device)
        layer: Any = model.layers[0]
        with torch.no_grad():
            model.embed_tokens.weight.copy_(target.embedding)
            model.lm_head.weight.copy_(target.lm_head if target_ids is None else target.lm_head[target_ids])
            # It starts with the target's own prediction from the last layer that it reads.
            model.fc.weight.mul_(_SMALL)
            model.fc.weight[:, -size:] += torch.eye(size, device=target.device)
            for part in layer.self_attn.o_proj, layer.mlp.down_proj:
                part.weight.mul_(_SMALL)
            x = functional.rms_norm(sample.taps[:, :, -1], (size,), eps=target.rms_norm_eps)
            finals = sample.finals
            model.norm.weight.copy_((finals * x).sum((0, 1)) / (x * x).sum((0, 1)))
        model.embed_tokens.weight.requires_grad_(False)
        if target_ids is None:
            model.lm_head.weight.requires_grad_(False)

    def guesses(self, batch: TextBatch, num_depths: int) -> Iterator[Guesses]:
        """See `Trainee`."""
        model: Any = self.module
        num_texts, length = batch.token_ids.shape[0], batch.token_ids.shape[1] - 1
        next_ids = batch.token_ids[:, 1:].flatten()
        positions = torch.arange(length, device=next_ids.device).repeat(num_texts)
        attention = DepthAttention(num_texts, length, next_ids.device)
        states = model.fuse(batch.taps[:, :-1].flatten(0, 1))
        for depth in range(min(num_depths, length)):
            hidden = model.run(states, next_ids, positions, attention.next_depth())
            shaped = hidden.unflatten(0, (num_texts, length))
            yield Guesses(depth, length - depth, _drafts(model, shaped[:, depth:]))
            states = _down(model.carry(hidden).unflatten(0, (num_texts, length)), 1).flatten(0, 1)

    def save(self, folder: Path) -> None:
        """Save the head in the format of `speculators`, without the target's own weights."""
        skipped = {"embed_tokens.weight"} | ({"lm_head.weight"} if self.target_ids is None else set())
        tensors = {name: value for name, value in self.module.state_dict().items() if name not in skipped}
        tensors |= vocabulary_tensors(self.target_ids, self._target.vocab_size)
        write_checkpoint(folder, self._config, tensors, self._target.dtype, self._recipe)

    def _config_json(self) -> dict[str, Any]:
        target, ids = self._target, self.target_ids
        draft_size = target.vocab_size if ids is None else len(ids)
        shared = head_config(
            self._recipe, target, method="eagle3", model_type="llama", num_layers=1, draft_size=draft_size
        )
        return {
            "architectures": ["Eagle3DraftModel"],
            **shared,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(target.taps(self._recipe)),
        }
