"""Tiny random models of the supported architectures, and of some that the engine must refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
    SmolLM3Config,
    StableLmConfig,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB_SIZE = 131  # prime, so that it is a multiple of no vector's length
_WEIGHT_STD = 0.2  # large enough that attention is not uniform and a wrong key changes the logits
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
_QWEN_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_LLAMA_4_SCALES = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 10.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 80}

SUPPORTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GQA),
    "llama_yarn_bias": lambda: LlamaConfig(**_GQA, rope_parameters=_YARN, attention_bias=True, mlp_bias=True),
    # The heads fill whole weight panels, so that threads that divide the KV heads take whole ones.
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
    "stablelm": lambda: StableLmConfig(**_GQA),
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

SWITCHED: dict[str, Callable[[], PreTrainedConfig]] = {
    # Windows in masks only, or in keywords only: transformers' eager attention uses the mask.
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_GQA, use_sliding_window=True, sliding_window=12, max_window_layers=1, **_QWEN_EXPERTS
    ),
    "phimoe": lambda: PhimoeConfig(**_GQA, sliding_window=12, num_local_experts=4),
    "olmoe_window_by_keyword": lambda: OlmoeConfig(**_GQA, sliding_window=12, num_experts=4, num_experts_per_tok=2),
    "gpt_oss_sinks": lambda: GptOssConfig(
        **{**_GQA, "max_position_embeddings": 8192}, sliding_window=12, head_dim=16, num_local_experts=4
    ),
    "gemma3": lambda: Gemma3TextConfig(**_GQA, head_dim=16, sliding_window=12),
    "cohere2": lambda: Cohere2Config(**_GQA, sliding_window=12),
    "exaone4": lambda: Exaone4Config(**_GQA, sliding_window=12, sliding_window_pattern=2),
    "smollm3_without_rope": lambda: SmolLM3Config(**_GQA, no_rope_layers=[1, 0, 1]),
    "ministral3_scales": lambda: Ministral3Config(**_GQA, head_dim=16, rope_parameters=_LLAMA_4_SCALES),
}
"""Models whose computation changes at some position, which here is within 20 tokens."""

LLAMA4_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 2,
    "max_position_embeddings": 160,
    "attn_temperature_tuning": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama4(chunk: int, floor_scale: int) -> Llama4Config:
    """A config of Llama 4 as published, with the text model's config nested."""
    return Llama4Config(text_config={**LLAMA4_TEXT, "attention_chunk_size": chunk, "floor_scale": floor_scale})


REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "falcon": lambda: FalconConfig(**_COMMON, alibi=False),
    "gptj": lambda: GPTJConfig(**_GPT2_STYLE, rotary_dim=8),
    "bloom": lambda: BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4),
    "recurrent_gemma": lambda: RecurrentGemmaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, lru_width=64
    ),
    "t5": lambda: T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
}


def save_tiny_model(
    name: str, directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, num_layers: int | None = None
) -> Path:
    """Write a tiny model with random weights (biases and norms too), rounded to ``dtype``; returns the directory.

    ``num_layers``: number of layers, for tests in an interpreter; None: all.
    """
    config: Any = ({**SUPPORTED, **SWITCHED, **REFUSED}[name])()
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    return save_random(config, directory, seed, dtype)


def save_random(config: PreTrainedConfig, directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model of a given config with random weights, as `save_tiny_model` does."""
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
