"""A model's sizes, from the config.json that its folder has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.plan.inputs.devices import PlanImpossible

_CONFIG = "config.json"
_BYTES = 2
"""Bytes of a weight and of an element of keys and values: bfloat16."""
_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures that decode; the last one, of models that also see or hear."""
_MOST = 1_000_000_000
"""Most that a size in a config may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A decoder-only transformer by its sizes."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_len: int
    num_experts: int = 1
    """Experts of a layer; 1: a plain layer."""
    experts_per_token: int = 1

    @property
    def num_attention_weights(self) -> int:
        """Weights of all layers' attention."""
        return self.layers * self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def num_expert_weights(self) -> int:
        """Weights of one expert in all layers."""
        return self.layers * 3 * self.hidden * self.intermediate

    @property
    def num_output_weights(self) -> int:
        """Weights of the output layer."""
        return self.hidden * self.vocab

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, embeddings included."""
        layers = self.num_attention_weights + self.num_experts * self.num_expert_weights
        return _BYTES * (layers + 2 * self.num_output_weights)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * _BYTES * self.layers * self.kv_heads * self.head_dim

    def read_bytes(self, num_rows: int) -> float:
        """Bytes of weights that a step of some rows reads: of experts those that some row is sent to."""
        share = 1 - (1 - self.experts_per_token / self.num_experts) ** num_rows
        experts = self.num_experts * share * self.num_expert_weights
        return _BYTES * (self.num_attention_weights + experts + self.num_output_weights)

    @property
    def activation_bytes(self) -> int:
        """Bytes that a row moves between kernels, about: each layer reads and writes them several times."""
        return _BYTES * (self.layers * (12 * self.hidden + 4 * self.intermediate) + 4 * self.vocab)

    @property
    def flops_per_row(self) -> float:
        """Operations of a row, attention to the context left out."""
        experts = self.experts_per_token * self.num_expert_weights
        return 2.0 * (self.num_attention_weights + experts + self.num_output_weights)


def read_model(path: Path) -> ModelSizes:
    """Sizes of a model's folder or of its config.json. Raises PlanImpossible, which names the field."""
    file = path / _CONFIG if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise PlanImpossible(f"{file} cannot be read ({why}): name a model's folder, or its config.json") from error
    if not isinstance(config, Mapping):
        raise PlanImpossible(f"{file} is no config of a model: it holds no object")
    is_folders = path.name == _CONFIG and path.parent.name
    return model_of(config, path.name if path.is_dir() else path.parent.name if is_folders else path.stem)


def _check_kind(config: Mapping[str, Any], name: str) -> None:
    """Raise PlanImpossible for a model that is no decoder: its sizes would be taken for one's."""
    named = config.get("architectures")
    architectures = [str(each) for each in named] if isinstance(named, list) else []
    if config.get("is_encoder_decoder") is True:
        what = "an encoder and a decoder"
    elif architectures and not any(each.endswith(_DECODERS) for each in architectures):
        what = architectures[0][:60]
    else:
        return
    raise PlanImpossible(f"config.json of {name}: the model is {what}; a plan needs a decoder alone, such as Llama")


def model_of(config: Mapping[str, Any], name: str) -> ModelSizes:
    """Sizes of a config as transformers writes it. Raises PlanImpossible."""
    _check_kind(config, name)
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, Mapping) else config

    def size(*names: str, default: int | None = None) -> int:
        value = next((fields[each] for each in names if fields.get(each) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            told = "is missing" if value is None else f"is {str(value)[:20]!r}, no whole number from 1 to {_MOST}"
            raise PlanImpossible(f"config.json of {name}: {names[0]} {told}")
        return value

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "num_heads")
    num_experts = size("num_local_experts", "num_experts", "n_routed_experts", default=1)
    intermediate = size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    if num_experts > 1:
        intermediate = size("moe_intermediate_size", default=intermediate)
    return ModelSizes(
        name=name,
        hidden=hidden,
        intermediate=intermediate,
        layers=size("num_hidden_layers", "n_layer", "num_layers"),
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=max(1, hidden // heads)),
        vocab=size("vocab_size"),
        max_len=size("max_position_embeddings", "n_positions", default=4096),
        num_experts=num_experts,
        experts_per_token=min(num_experts, size("num_experts_per_tok", default=1)),
    )
