"""Tiny random models of the supported architectures, and of some that the engine must refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB_SIZE = 131  # prime, so that no layer's size is a multiple of a vector by luck
_WEIGHT_STD = 0.2  # far from uniform attention: a wrong key must show in the logits
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "initializer_range": _WEIGHT_STD,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}
_GPT2_STYLE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": 160,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 80}

SUPPORTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GQA),
    "llama_yarn_bias": lambda: LlamaConfig(**_GQA, rope_parameters=_YARN, attention_bias=True, mlp_bias=True),
    # Heads of whole weight panels: where threads divide the kv heads, each takes whole ones.
    "llama_wide_heads": lambda: LlamaConfig(
        **{**_COMMON, "num_attention_heads": 8}, num_key_value_heads=4, head_dim=32
    ),
    "qwen2": lambda: Qwen2Config(**_GQA, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_GQA, head_dim=24),
    "mistral": lambda: MistralConfig(**_GQA, sliding_window=12),
    "gemma2": lambda: Gemma2Config(
        **_GQA, head_dim=16, sliding_window=12, attn_logit_softcapping=5.0, final_logit_softcapping=7.0
    ),
    "phi3": lambda: Phi3Config(**_GQA),
    "gpt_neox": lambda: GPTNeoXConfig(
        **_COMMON,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "gpt2": lambda: GPT2Config(**_GPT2_STYLE, initializer_range=_WEIGHT_STD),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        ffn_dim=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=160,
        word_embed_proj_dim=64,
        init_std=_WEIGHT_STD,
    ),
}

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "falcon": lambda: FalconConfig(**_COMMON, alibi=False),
    "gptj": lambda: GPTJConfig(**_GPT2_STYLE, rotary_dim=8),
    "bloom": lambda: BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4),
    "mamba": lambda: MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, state_size=8),
    "stablelm": lambda: StableLmConfig(**_GQA),
    "t5": lambda: T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    "dynamic_rope_llama": lambda: LlamaConfig(
        **_GQA, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
}


def save_tiny_model(name: str, directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny model with random weights (biases and norms too), rounded to ``dtype``; returns the directory."""
    config = (SUPPORTED.get(name) or REFUSED[name])()
    torch.manual_seed(seed)
    if isinstance(config, T5Config):
        model = T5ForConditionalGeneration(config)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "norm" not in parameter_name and parameter.std() < _WEIGHT_STD / 4:
                parameter.normal_(0.0, _WEIGHT_STD)
    model.to(dtype).save_pretrained(directory, safe_serialization=True)
    return directory
