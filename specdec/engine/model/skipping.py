"""A model without some of its sublayers, and its agreement with the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.errors import ModelLoadError
from specdec.engine.model.tapping import find_decoder
from specdec.engine.sublayers import SkippedSublayers

LEAST_AGREEMENT = 0.1
"""Share of equal likeliest tokens, below which skipping costs more than it saves."""
_SAMPLE = '''\
The ferry left the harbour a little after seven, when the fog had lifted from the water and the gulls had gone back to \
the fish market. On deck, a woman was reading a letter that she had read many times before. She folded it, put it into \
the pocket of her coat, and looked at the coast, which was getting smaller and smaller until it was only a line.

def merge(left, right):
    """Return the items of two sorted lists as one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result


class Counter:
    def __init__(self, start=0):
        self.value = start

    def add(self, amount=1):
        self.value += amount
        return self.value
'''


class NoAttention(nn.Module):
    """Replaces a skipped attention."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Add nothing."""
        return torch.zeros_like(hidden_states), None


class NoMlp(nn.Module):
    """Replaces a skipped MLP."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add nothing."""
        return torch.zeros_like(hidden_states)


def has_attention(layer: nn.Module) -> bool:
    """Whether a decoder layer attends."""
    return not isinstance(getattr(layer, "self_attn", None), NoAttention)


def has_mlp(layer: nn.Module) -> bool:
    """Whether a decoder layer has an MLP."""
    return not isinstance(getattr(layer, "mlp", None), NoMlp)


def sample_ids(tokenizer_json: str, vocab_size: int, num_tokens: int = 192) -> list[int]:
    """Up to `num_tokens` of common prose and code."""
    ids: list[int] = Tokenizer.from_str(tokenizer_json).encode(_SAMPLE).ids if tokenizer_json else []
    return [token for token in ids if token < vocab_size][:num_tokens]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """A model's layers, each with `self_attn` and `mlp`. Raises ModelLoadError if they are built otherwise."""
    found = find_decoder(model)
    if found is None or not all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in found[1]):
        raise ModelLoadError(f"layer_skip: the layers of {type(model).__name__} do not each have self_attn and mlp")
    return found[1]


def remove_sublayers(model: PreTrainedModel, skipped: SkippedSublayers) -> None:
    """Remove sublayers from a model; layers without any sublayer are removed, and later ones move up.

    Raises ModelLoadError as `decoder_layers` does.
    """
    layers = decoder_layers(model)
    kept = [number for number in range(len(layers)) if number not in skipped.layers]
    for number in kept:
        layer: Any = layers[number]
        if number in skipped.attention:
            layer.self_attn = NoAttention()
        if number in skipped.mlp:
            layer.mlp = NoMlp()
    parent, _ = find_decoder(model) or (model, layers)
    name = next(name for name, child in parent.named_children() if child is layers)
    setattr(parent, name, nn.ModuleList([layers[number] for number in kept]))
    config: Any = model.config.get_text_config(decoder=True)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number] for number in kept]


@contextmanager
def leaving_out(model: PreTrainedModel, skipped: SkippedSublayers) -> Iterator[None]:
    """Skip sublayers in passes inside the context; restores the modules. Raises as `decoder_layers` does."""
    replaced: list[tuple[Any, str, nn.Module]] = []
    layers = decoder_layers(model)
    try:
        for numbers, name, kind in ((skipped.attention, "self_attn", NoAttention), (skipped.mlp, "mlp", NoMlp)):
            for number in numbers:
                replaced.append((layers[number], name, getattr(layers[number], name)))
                setattr(layers[number], name, kind())
        yield
    finally:
        for layer, name, module in replaced:
            setattr(layer, name, module)


@torch.inference_mode()
def likeliest(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """A model's likeliest token after each of these, [T], by its own dense forward pass."""
    ids = torch.tensor([token_ids], device=model.device)
    best: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].argmax(dim=1)
    return best


def agreement(ours: torch.Tensor, whole: torch.Tensor) -> float:
    """Share of places at which two models have the same likeliest token."""
    return float((ours == whole).float().mean())


def too_different(skipped: SkippedSublayers, share: float) -> str:
    """The error for a model that hardly agrees with the whole one."""
    return (
        f"layer_skip: without {skipped} only {share:.0%} of the likeliest tokens are those of the whole model. "
        "Skip sublayers in the model's middle, or use a model that was trained for early exit"
    )
