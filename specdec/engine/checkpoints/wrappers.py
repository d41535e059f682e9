"""The text model of wrappers of vision-language models.

Published checkpoints of many text models are wrapped with an encoder of images. Such a wrapper is built without its
encoders, whose weights then stay unread. Where transformers has a class for the text model alone, that class takes the
weights, so that all that the engine does with plain models works for it; else the wrapper's own forward pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from specdec.engine.errors import ModelNotSupported

_NUM_TRIAL_TOKENS = 5
_EQUAL = 1e-5  # of the logits' spread


def own_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that loads a config, if `AutoModelForCausalLM` does not: of a wrapper, or of a wrapper's text model.

    Raises ``ModelNotSupported`` if transformers has no class that generates text from it.
    """
    plain: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    wrapper: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    names = getattr(config, "architectures", None) or ()
    if wrapper is not None and (plain in (None, wrapper) or wrapper.__name__ in names):
        found: type[PreTrainedModel] = wrapper
        return found
    if plain is not None or not type(config).__module__.startswith("transformers."):
        return None
    for kind in (getattr(transformers, name, None) for name in names):
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.config_class is type(config):
            return kind
    raise ModelNotSupported(config.model_type, "transformers has no class that generates text from it")


@contextmanager
def without_encoders(config: PreTrainedConfig) -> Iterator[None]:
    """Models of a wrapper's class that are built inside the context lack all models but the text model."""
    wrapper: Any = own_class(config)
    if wrapper is None:
        yield
        return
    init = wrapper.__init__

    def build(self: PreTrainedModel, own: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        init(self, own, *args, **kwargs)
        _remove_encoders(self)

    wrapper.__init__ = build
    try:
        yield
    finally:
        wrapper.__init__ = init


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The text model of a loaded wrapper, as a class of its own if there is one that computes the same logits; else the
    wrapper, or a model that is none. Without weights there are no logits to compare.
    """
    inner = _language_model(model)
    if inner is None:
        return model
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(inner.config), None)
    if kind is None:
        return model
    with torch.device("meta"):
        text: PreTrainedModel = kind(inner.config)
    prefix = text.base_model_prefix
    base: type = type(inner)
    if type(getattr(text, prefix, None)) is not base:
        return model
    setattr(text, prefix, inner)
    text.set_output_embeddings(model.get_output_embeddings())
    text.config, text.generation_config = inner.config, model.generation_config
    text.eval()
    if model.device.type == "meta":
        return text
    if any(parameter.is_meta for parameter in text.parameters()):
        return model
    return text if _agree(text, model) else model


def _agree(text: PreTrainedModel, wrapper: PreTrainedModel) -> bool:
    wrapper.eval()
    ids = torch.arange(_NUM_TRIAL_TOKENS, device=text.device)[None] + 3
    with torch.inference_mode():
        found, wanted = (model(input_ids=ids, use_cache=False).logits.float() for model in (text, wrapper))
    return float((found - wanted).abs().max()) <= _EQUAL * float(wanted.std())


def _text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:
        raise ModelNotSupported(config.model_type, f"its text model is ambiguous: {error}") from error


def _language_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """The part of a wrapper whose config is the text config; None if there is none."""
    text = _text_of(model.config)
    if text is model.config:
        return None
    for module in model.modules():
        if module is not model and isinstance(module, PreTrainedModel) and isinstance(module.config, type(text)):
            return module
    return None


def _remove_encoders(model: PreTrainedModel) -> None:
    """Replace all models in a wrapper that are neither its text model nor around it."""
    inner = _language_model(model)
    if inner is None:
        return
    for parent in [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not inner]:
        if not any(module is inner for module in parent.modules()):
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, PreTrainedModel) and not any(module is inner for module in child.modules()):
                setattr(parent, name, nn.Identity())
