"""Runs a model's modules without weights, so that most models that cannot be served are refused before a file is read.

On torch's meta device a pass costs only its Python. Modules that look at values, and kernels that lack this device,
fail there with a RuntimeError; then only the checks of the loaded model decide.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec.engine.attention.paged import AttentionError
from specdec.engine.attention.torch_kernels import TiledAttention
from specdec.engine.checkpoints.wrappers import own_class, text_model, without_encoders
from specdec.engine.errors import ModelLoadError, ModelNotSupported
from specdec.engine.model.model_check import told
from specdec.engine.model.proofs.probe import SelfTest
from specdec.engine.model.ragged import RaggedModel

_NUM_POSITIONS = 256
_BLOCK_SIZE = 16


def rehearse(config: PreTrainedConfig) -> None:
    """Check a config's class by passes without weights.

    Raises ``ModelNotSupported``, or ``ModelLoadError`` if the model cannot be built. Does nothing for code that is not
    transformers' own.
    """
    if not type(config).__module__.startswith("transformers."):
        return
    device = torch.device("meta")
    model = _without_weights(config, device)
    if model is None:
        return
    vocab_size = int(config.get_text_config(decoder=True).vocab_size)
    try:
        ragged = RaggedModel(model, TiledAttention())
        with torch.inference_mode():
            ragged.record_attention(SelfTest(vocab_size, _NUM_POSITIONS, _BLOCK_SIZE, device))
    except ModelNotSupported as error:
        if not isinstance(error.__cause__, RuntimeError) or isinstance(error.__cause__, AttentionError):
            raise


def _without_weights(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel | None:
    try:
        with device, without_encoders(config):
            own: Any = own_class(config)
            build = AutoModelForCausalLM.from_config if own is None else own._from_config
            return text_model(build(config, attn_implementation="eager").eval())
    except RuntimeError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, AssertionError) as error:
        reason = told(error, config)
        raise ModelNotSupported(config.model_type, f"transformers cannot build it from its config: {reason}") from error
    except ImportError as error:
        missing = ", ".join(re.findall(r"pip install ([\w-]+)", str(error))) or str(error)
        raise ModelLoadError(f"model: transformers needs more packages for {config.model_type}: {missing}") from error
