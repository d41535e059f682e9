"""The two shapes: a deep target and a shallow draft, at one eighth of its parameters.

On a CPU a step of so small a model costs overhead per layer, hence the draft's two layers;
two are also the least that can copy from the context (an induction head needs a layer before it).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from .attention import register
from .tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

MAX_POSITIONS = 2048


def _config(**shape: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        head_dim=64,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        **shape,
    )


def target_config() -> LlamaConfig:
    """15.8 M parameters in ten layers."""
    return _config(
        hidden_size=384,
        intermediate_size=896,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=2,
    )


def draft_config() -> LlamaConfig:
    """1.97 M parameters in two layers."""
    return _config(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
    )


def build(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Return a freshly initialised float32 model whose layers are compiled for training."""
    torch.manual_seed(seed)
    config.initializer_range = 0.02
    config._attn_implementation = register()
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)  # every block starts as the identity
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    return model


def generation_config() -> GenerationConfig:
    """What ``generate`` and servers read: the special tokens, greedy unless asked otherwise."""
    return GenerationConfig(
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        do_sample=False,
    )
