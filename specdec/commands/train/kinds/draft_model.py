"""Training of a small draft: an ordinary model, distilled from its target."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec.commands.train.checkpoint import add_recipe
from specdec.commands.train.recipe import Recipe, TrainingRefused
from specdec.commands.train.recorded.states import TextBatch
from specdec.commands.train.trainee import DraftRows, Guesses, TargetParts, chosen_rows

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


class DraftModelTrainee:
    """`Trainee` for a new Llama of the recipe's sizes, or for an existing draft."""

    lead = 0

    def __init__(self, recipe: Recipe, target: TargetParts) -> None:
        """New weights come from torch's random state. Raises TrainingRefused if the draft has another vocabulary."""
        self.target_ids: torch.Tensor | None = None
        self._recipe, self._target = recipe, target
        model: Any
        if recipe.initial_draft is None:
            model = LlamaForCausalLM(_new_config(recipe, target))
        else:
            model = AutoModelForCausalLM.from_pretrained(recipe.initial_draft, dtype=torch.float32)
            if model.config.vocab_size != target.vocab_size:
                raise TrainingRefused(f"{recipe.initial_draft} has another vocabulary than the target")
            if not _has_plain_head(model):
                raise TrainingRefused(
                    f"{recipe.initial_draft} scales or caps its logits, which training does not support"
                )
        self.module: nn.Module = model.to(target.device)

    def guesses(self, batch: TextBatch, num_depths: int) -> Iterator[Guesses]:
        """See `Trainee`. Each depth equals the first depth of another place, so only that one is learned."""
        model: Any = self.module
        hidden = model.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        num_places = hidden.shape[1]
        for depth in range(1 if model.training else min(num_depths, num_places)):
            yield Guesses(depth, num_places - depth, _drafts(model.get_output_embeddings(), hidden[:, depth:]))

    def save(self, folder: Path) -> None:
        """Save the model in transformers' format, with the target's tokenizer."""
        model: Any = self.module
        learned_dtype = model.dtype
        model.to(self._target.dtype).save_pretrained(folder)
        model.to(learned_dtype)
        for name in _TOKENIZER_FILES:
            if (self._target.directory / name).is_file():
                shutil.copyfile(self._target.directory / name, folder / name)
        add_recipe(folder, self._recipe)


def _drafts(head: Any, hidden: torch.Tensor) -> DraftRows:
    """Drafts from states [B, N, H]."""

    def at(texts: torch.Tensor, places: torch.Tensor, columns: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        bias = head.bias if head.bias is None or columns is None else head.bias[columns]
        return functional.linear(hidden[texts, places], chosen_rows(head.weight, columns), bias), None

    return at


@torch.inference_mode()
def _has_plain_head(model: Any) -> bool:
    """Whether logits are a product with the last states and nothing else."""
    token_ids = torch.arange(4)[None]
    hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    logits = model(input_ids=token_ids, use_cache=False).logits
    return torch.allclose(model.get_output_embeddings()(hidden), logits, rtol=1e-3, atol=1e-3)


def _new_config(recipe: Recipe, target: TargetParts) -> LlamaConfig:
    if recipe.hidden_size % recipe.num_heads:
        raise TrainingRefused(f"a hidden size of {recipe.hidden_size} cannot be divided into {recipe.num_heads} heads")
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size or 2 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=1,
        max_position_embeddings=target.num_positions,
        rms_norm_eps=target.rms_norm_eps,
        tie_word_embeddings=True,
    )
