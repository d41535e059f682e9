"""A model's config.json: read, or refused in one line; and the longest context that it allows."""

from __future__ import annotations

import logging
from pathlib import Path

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from specdec.engine.checkpoints.folder import read_json
from specdec.engine.checkpoints.wrappers import own_class
from specdec.engine.errors import ModelLoadError, ModelNotSupported
from specdec.engine.model.model_check import check_config
from specdec.engine.model.switches import length_limits
from specdec.engine.settings import EngineSettings

_FAULTS = (ValueError, OSError, KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError)
"""Errors of transformers over a config with missing or odd values."""
_MOST_REASON = 300  # characters of transformers' errors
_UNLIMITED_LEN = 4096  # tokens; default for models without a limit
_logger = logging.getLogger(__name__)


def read_config(directory: Path, settings: EngineSettings) -> PreTrainedConfig:
    """The config of a model's folder. Raises ``ModelLoadError``, and ``ModelNotSupported`` for what is never served."""
    written = read_json(directory / "config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=settings.trust_remote_code)
    except _FAULTS as error:
        kind = written.get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING and not settings.trust_remote_code:
            own_code = "set trust_remote_code if you trust its own code, or " if "auto_map" in written else ""
            raise ModelLoadError(
                f"model: {settings.model} is of model_type {kind}, which transformers {transformers.__version__} does "
                f"not know; {own_code}install a transformers that knows it"
            ) from error
        reason = " ".join(str(error).split())[:_MOST_REASON]
        raise ModelLoadError(f"model: {settings.model} has no usable config.json: {reason}") from error
    check_config(config)
    own_class(config)  # raises if there is none
    return config


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
