"""Training of a DSpark head: the blocks after all tokens of a text at once, each with the same input as in serving.

The block of place n begins with the token n + 1, the last committed one, and masks follow. Its rows read the entries of
the target's states up to n, and each other in both directions. Slot k drafts the token n + 2 + k, corrected by the
token before it; in training that is the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specdec.commands.train.checkpoint import write_checkpoint
from specdec.commands.train.kinds.speculators import head_config, vocabulary_tensors
from specdec.commands.train.recipe import Recipe, TrainingRefused
from specdec.commands.train.recorded.states import TextBatch
from specdec.commands.train.trainee import DraftRows, Guesses, TargetParts, chosen_rows
from specdec.drafting.heads.config import read_config
from specdec.drafting.heads.methods.dflash import DFlashModel
from specdec.drafting.heads.methods.dspark import SparkModel
from specdec.drafting.heads.parts import Attend

_SMALL = 0.1
"""Scale of new weights, small beside the target's that the head starts from."""


def block_attention(entries: Sequence[tuple[torch.Tensor, torch.Tensor]], shape: tuple[int, int, int]) -> Attend:
    """Attention of all blocks of all texts; `shape`: texts, places per text, and slots per block.

    `entries` has by layer the keys and values [texts * places, kv heads, d] of the target's states. Memory: texts *
    heads * places^2 * slots weights.
    """
    num_texts, num_places, _ = shape
    places = torch.arange(num_places, device=entries[0][0].device)
    is_later = (places[None, :] > places[:, None])[:, None]  # [places, 1, entries]

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        q = query.unflatten(0, shape)
        own_keys, own_values = (each.repeat_interleave(group, 1).unflatten(0, shape) for each in (key, value))
        keys, values = (
            each.repeat_interleave(group, 1).unflatten(0, (num_texts, num_places)) for each in entries[layer]
        )
        scale = q.shape[-1] ** -0.5
        before = torch.einsum("bpshd,bkhd->bhpsk", q, keys) * scale
        within = torch.einsum("bpshd,bpthd->bhpst", q, own_keys) * scale
        weights = torch.cat([before.masked_fill(is_later, -torch.inf), within], dim=-1).softmax(-1)
        attended = torch.einsum("bhpsk,bkhd->bpshd", weights[..., :num_places], values)
        attended = attended + torch.einsum("bhpst,bpthd->bpshd", weights[..., num_places:], own_values)
        return attended.flatten(0, 2)

    return attend


class DSparkTrainee:
    """`Trainee` for a DSpark head that has its target's width and embedding; a block has a slot per depth."""

    lead = 1

    def __init__(self, recipe: Recipe, target: TargetParts, target_ids: torch.Tensor | None, sample: TextBatch) -> None:
        """`sample` gives the scale of the target's states. Weights come from torch's random state.

        Raises TrainingRefused if the target has no embedding for the mask.
        """
        self.target_ids = target_ids
        self._recipe, self._target = recipe, target
        self._layer_ids, self._mask_token_id = target.taps(recipe), _mask_token(target.embedding)
        self._config = self._config_json()
        config, size = read_config(self._config), target.hidden_size
        draft_size = target.vocab_size if target_ids is None else len(target_ids)
        num_taps = len(self._layer_ids)
        block = DFlashModel(config, num_taps, size, target.vocab_size, draft_size, target.num_positions)
        spark = SparkModel(config, target.vocab_size, draft_size)
        self._block, self._spark = block.to(target.device), spark.to(target.device)
        self.module: nn.Module = nn.ModuleList([block, spark])
        with torch.no_grad():
            block.embed_tokens.weight.copy_(target.embedding)
            block.lm_head.weight.copy_(target.lm_head if target_ids is None else target.lm_head[target_ids])
            # Entries start as the last layer that it reads, and logits with the target's scale.
            block.fc.weight.mul_(_SMALL)
            block.fc.weight[:, -size:] += torch.eye(size, device=target.device)
            block.norm.weight.copy_((sample.finals.square().sum((0, 1)) / sample.lengths.sum()).sqrt())
            if spark.markov_head is not None:
                spark.markov_head.markov_w2.weight.mul_(_SMALL)
        block.embed_tokens.weight.requires_grad_(False)
        if target_ids is None:
            block.lm_head.weight.requires_grad_(False)

    def guesses(self, batch: TextBatch, num_depths: int) -> Iterator[Guesses]:
        """See `Trainee`; depths end with the slots of a block."""
        num_texts, num_places = batch.token_ids.shape[0], batch.token_ids.shape[1] - 1
        shape = (num_texts, num_places, self._recipe.num_depths)
        hidden = self._hidden(batch, shape).unflatten(0, shape)
        for depth in range(min(num_depths, shape[2], num_places)):
            yield Guesses(depth, num_places - depth, self._drafts(hidden[:, :, depth], batch.token_ids[:, 1 + depth :]))

    def _drafts(self, hidden: torch.Tensor, before: torch.Tensor) -> DraftRows:
        """Drafts of one slot from its states [B, N, H] and the tokens before its own [B, N]."""

        def at(
            texts: torch.Tensor, places: torch.Tensor, columns: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            rows = hidden[texts, places]
            # A vanilla Markov head has no states.
            added, confidence, _ = self._spark.bias(before[texts, places], rows, rows.new_zeros(len(rows), 0))
            if columns is not None and isinstance(added, torch.Tensor):
                added = added[:, columns]
            return functional.linear(rows, chosen_rows(self._block.lm_head.weight, columns)) + added, confidence

        return at

    def _hidden(self, batch: TextBatch, shape: tuple[int, int, int]) -> torch.Tensor:
        """Normalised states of the rows of all blocks, text by text."""
        block = self._block
        num_texts, num_places, num_slots = shape
        places = torch.arange(num_places, device=batch.token_ids.device)
        context = block.context(batch.taps[:, :-1].flatten(0, 1))
        entries = [block.entries(layer, context, places.repeat(num_texts)) for layer in range(len(block.layers))]
        embedded = block.embed_tokens.weight[self._mask_token_id].expand(*shape, -1).clone()
        embedded[:, :, 0] = block.embed_tokens(batch.token_ids[:, 1:])
        positions = places[:, None] + torch.arange(1, num_slots + 1, device=places.device)
        return block.run(embedded.flatten(0, 2), positions.expand(shape).flatten(), block_attention(entries, shape))

    def save(self, folder: Path) -> None:
        """Save the head in the format of `speculators`, without the target's own weights."""
        skipped = {"embed_tokens.weight"} | ({"lm_head.weight"} if self.target_ids is None else set())
        tensors = {name: value for name, value in self._block.state_dict().items() if name not in skipped}
        tensors |= self._spark.state_dict()
        tensors |= vocabulary_tensors(self.target_ids, self._target.vocab_size)
        write_checkpoint(folder, self._config, tensors, self._target.dtype, self._recipe)

    def _config_json(self) -> dict[str, Any]:
        recipe, target, ids = self._recipe, self._target, self.target_ids
        draft_size = target.vocab_size if ids is None else len(ids)
        shared = head_config(
            recipe, target, method="dspark", model_type="qwen3", num_layers=recipe.num_layers, draft_size=draft_size
        )
        return {
            "architectures": ["DSparkDraftModel"],
            **shared,
            "aux_hidden_state_layer_ids": list(self._layer_ids),
            "block_size": recipe.num_depths,
            "mask_token_id": self._mask_token_id,
            "sample_from_anchor": True,
            "markov_head_type": "vanilla",
            "markov_rank": recipe.markov_rank,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "tie_word_embeddings": False,
        }


def _mask_token(embedding: torch.Tensor) -> int:
    """The last token with an embedding that is not zero, as padding's is: zero rows would not differ by position."""
    rows = embedding.abs().sum(-1).nonzero()
    if not len(rows):
        raise TrainingRefused("the target's embedding is zero")
    return int(rows[-1])
