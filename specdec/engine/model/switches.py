"""Positions after which a model computes differently: sliding windows, chunks, scales, frequencies.

The self-test's sequences are short, while published models switch thousands of tokens later. A switch whose far side
cannot be served limits the context (`length_limits`). Other switches are moved into the self-test's reach (`shortened`)
on the loaded model, whose modules read them in each pass.
"""

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from specdec.engine.errors import ModelLoadError, ModelNotSupported

SHORT = 12
"""Tokens before every shortened switch; the self-test has 37 tokens."""
_WINDOW = "sliding_window"
_TEMPERATURE = "attn_temperature_tuning"
_SCALE_FROM = "original_max_position_embeddings"
_SCALE_BETA = "llama_4_scaling_beta"
_UNLIMITED_LEN = 4096  # tokens; default for models without a limit
_logger = logging.getLogger(__name__)


def rope_parameter_sets(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """All sets of rope parameters: one, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters or "rope_theta" in parameters:
        yield parameters
        return
    for value in parameters.values():
        if isinstance(value, dict):
            yield value


def length_limits(config: PreTrainedConfig) -> dict[str, int]:
    """Tokens up to which a model of this text config is served exactly, by the cause of the limit."""
    shared = getattr(config, _SCALE_FROM, 0)
    longrope = [
        int(shared or rope.get(_SCALE_FROM) or 0)  # the shared one rules at transformers, too
        for rope in rope_parameter_sets(config)
        if rope.get("rope_type") == "longrope"
    ]
    limits = {} if not longrope else {"longrope, which changes all frequencies": min(longrope)}
    trained = getattr(config, "max_position_embeddings", None)
    if trained and any("dynamic" in str(rope.get("rope_type")) for rope in rope_parameter_sets(config)):
        limits["dynamic rope, which changes all frequencies with the longest sequence"] = int(trained)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk:
        limits["chunked attention, which only masks express"] = int(chunk)
    scale = getattr(config, "floor_scale", None)
    if scale and getattr(config, _TEMPERATURE, False):
        limits["attention temperature, which depends on the place in the batch"] = int(scale) - 1
    return limits


def longest_context(asked: int | None, config: PreTrainedConfig) -> int:
    """Tokens of the longest sequence: the setting, or the model's limit."""
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    for what, most in length_limits(text).items():
        if asked is not None and asked > most:
            raise ModelNotSupported(
                config.model_type, f"it is exact only up to {most} tokens ({what}); set max_model_len to {most} or less"
            )
        if limit is None or most < limit:
            limit = most
            _logger.warning("the context is limited", extra={"max_model_len": asked or most, "by": what})
    if limit is not None and asked is not None and asked > limit:
        raise ModelLoadError(f"max_model_len {asked} exceeds the model's {limit} positions")
    return int(asked or limit or _UNLIMITED_LEN)


def switch_off_limited(model: PreTrainedModel) -> None:
    """Switch off features that begin beyond `length_limits`, but would read a row's place in the batch."""
    for module in model.modules():
        if getattr(module, _TEMPERATURE, False):
            setattr(module, _TEMPERATURE, False)


@contextmanager
def shortened(model: PreTrainedModel) -> Iterator[bool]:
    """Move every switch that is served on both sides to `SHORT` tokens. Yields whether there are any."""
    undo: list[tuple[Any, str, Any]] = []

    def shorten(owner: Any, name: str) -> None:
        value = owner.get(name) if isinstance(owner, MutableMapping) else getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > SHORT:
            undo.append((owner, name, value))
            _set(owner, name, SHORT)

    configs = {id(config): config for config in _configs(model)}
    try:
        for config in configs.values():
            shorten(config, _WINDOW)
            for rope in rope_parameter_sets(config):
                if rope.get(_SCALE_BETA):
                    shorten(rope, _SCALE_FROM)
        for module in model.modules():
            shorten(module, _WINDOW)
        yield bool(undo)
    finally:
        for owner, name, value in reversed(undo):
            _set(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, MutableMapping):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            yield config
            yield config.get_text_config()
