"""Reads a head's config.json, in any format, into one form.

Layer ids are those of `specdec.engine.tap`: k is the output of k layers. Formats differ by one, and only acceptance
would show a mistake, so each key is read as its writers define it:

    eagle_aux_hidden_state_layer_ids, aux_hidden_state_layer_ids    (speculators, EAGLE)    k
    eagle_config.eagle_aux_hidden_state_layer_ids                   (SpecForge, SGLang)     output of layer k: k + 1
    target_layer_ids, dflash_config.target_layer_ids                (z-lab)                 output of layer k: k + 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import structlog
from transformers import LlamaConfig

from specdec.drafting.heads.checkpoint import HeadRefused

_METHODS = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Qwen3ForCausalLMEagle3": "eagle3",
    "PEagleDraftModel": "peagle",
    "DFlashDraftModel": "dflash",
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
}
_LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "attention_bias", "mlp_bias", "hidden_act"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
_FIRST_BLOCK = 8


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head's config, independent of its format."""

    method: str
    """The method that the config names; "" if none."""
    values: dict[str, Any]
    """The whole config, from which the other fields are read."""
    layers: LlamaConfig
    """Sizes and rotary embedding of its decoder layers."""
    has_head_norms: bool
    """Whether queries and keys are normed per head."""
    draft_vocab_size: int | None
    layer_ids: tuple[int, ...] | None
    """The target's layers that it reads; None: the config names none."""
    num_speculative_tokens: int | None

    def flag(self, name: str, default: bool) -> bool:
        """A boolean value. Raises HeadRefused for another type."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise HeadRefused(f"config.json: {name} is {value!r}, not true or false")
        return value

    def token_id(self, *names: str) -> int:
        """The first of these values that is a token id. Raises HeadRefused if none is."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        raise HeadRefused(f"config.json: {names[0]} is missing")

    @property
    def block_size(self) -> int:
        """Tokens of a block that is drafted in one pass."""
        return int(self.values.get("block_size") or _FIRST_BLOCK)

    @property
    def is_speculators(self) -> bool:
        """Whether it is in the `speculators` format."""
        return "speculators_model_type" in self.values

    def taps(self, chosen: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
        """The target's layers that the head reads: the operator's choice, else the config's.

        Without either they are (2, n//2, n-3), with a warning: only low acceptance would show wrong ids.
        """
        ids = chosen or self.layer_ids
        if ids is None:
            ids = (2, num_layers // 2, num_layers - 3)
            log = structlog.get_logger("specdec.drafting.heads")
            log.warning("head_layers_guessed", layer_ids=ids, reason="the head's config names no layers: set layer_ids")
        return ids


def read_config(config: dict[str, Any]) -> HeadConfig:
    """Read a config.json of any format. Raises HeadRefused."""
    inner = config.get("transformer_layer_config")
    flat = dict(inner) if isinstance(inner, dict) else config
    names = config.get("architectures") or []
    method = str(config.get("speculators_model_type") or "")
    if not method:
        known = [_METHODS[name] for name in names if name in _METHODS]
        method = known[0] if known else "medusa" if config.get("model_type") == "medusa" else ""
    if any("DSpark" in str(name) for name in names):
        method = "dspark"
    values = {**config}
    for name in ("dflash_config", "eagle_config"):
        if isinstance(config.get(name), dict):
            values = {**config[name], **values}
    size = config.get("draft_vocab_size")
    return HeadConfig(
        method=method,
        values=values,
        layers=_layers(flat),
        has_head_norms=flat.get("model_type") == "qwen3" or any("Qwen3" in str(name) for name in names),
        draft_vocab_size=None if size is None else int(size),
        layer_ids=_layer_ids(config),
        num_speculative_tokens=_num_tokens(config),
    )


def _layers(flat: dict[str, Any]) -> LlamaConfig:
    given = {name: flat[name] for name in _LAYER_FIELDS if flat.get(name) is not None}
    if flat.get("num_key_value_heads") is None and "num_attention_heads" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]
    if flat.get("model_type") == "qwen3" and "head_dim" not in given:
        given["head_dim"] = 128  # Qwen3's default
    if given.get("hidden_act", "silu") != "silu":
        raise HeadRefused(f"config.json: hidden_act {given['hidden_act']} is not supported, only silu")
    try:
        layers = LlamaConfig(**given)
    except (TypeError, ValueError, KeyError) as error:
        raise HeadRefused(f"config.json: {error}") from error
    if layers.head_dim is None:
        layers.head_dim = layers.hidden_size // layers.num_attention_heads
    return layers


def _layer_ids(config: dict[str, Any]) -> tuple[int, ...] | None:
    for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        if config.get(name) is not None:
            return _integers(name, config[name], 0)
    for parent in ("eagle_config", "dflash_config"):
        part = config.get(parent)
        for name in ("eagle_aux_hidden_state_layer_ids", "target_layer_ids"):
            if isinstance(part, dict) and part.get(name) is not None:
                return _integers(f"{parent}.{name}", part[name], 1)
    if config.get("target_layer_ids") is not None:
        return _integers("target_layer_ids", config["target_layer_ids"], 1)
    return None


def _integers(name: str, value: Any, offset: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, int) for each in value):
        raise HeadRefused(f"config.json: {name} is {value!r}, not a list of integers")
    return tuple(each + offset for each in value)


def _num_tokens(config: dict[str, Any]) -> int | None:
    speculators = config.get("speculators_config")
    methods = speculators.get("proposal_methods") if isinstance(speculators, dict) else None
    if isinstance(methods, list) and methods and isinstance(methods[0], dict):
        value = methods[0].get("speculative_tokens")
        return value if isinstance(value, int) and value > 0 else None
    return None
