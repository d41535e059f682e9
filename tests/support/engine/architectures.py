"""Random pairs of architectures beside the shipped one, with the tiny pair's byte tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, PreTrainedConfig, Qwen3Config

from tests.support.services.model_pair import ModelPair
from tests.support.services.tiny_pair import byte_tokenizer

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

CONFIGS: dict[str, Callable[[int], PreTrainedConfig]] = {
    "qwen3": lambda vocab: Qwen3Config(vocab_size=vocab, head_dim=32, tie_word_embeddings=True, **_SIZES, **_SPECIAL),
    "gemma2": lambda vocab: Gemma2Config(
        vocab_size=vocab, head_dim=16, sliding_window=24, query_pre_attn_scalar=16, **_SIZES, **_SPECIAL
    ),
    "gpt2": lambda vocab: GPT2Config(
        vocab_size=vocab, n_embd=64, n_layer=2, n_head=4, n_positions=512, initializer_range=0.2, **_SPECIAL
    ),
}


def make_pair(architecture: str, folder: Path, *, noise: float = 0.004) -> ModelPair:
    """Write a random target, and a draft that is the target with noise on its weights. See `CONFIGS`."""
    return save_pair(CONFIGS[architecture](len(byte_tokenizer())), folder, noise=noise)


def save_pair(config: PreTrainedConfig, folder: Path, *, noise: float = 0.004) -> ModelPair:
    """As `make_pair`, for a configuration, which gets the vocabulary of the byte tokenizer."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config.vocab_size = len(tokenizer)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    pair = ModelPair(folder / "target", folder / "draft")
    for path in (pair.target, pair.draft):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * noise)
    return pair
