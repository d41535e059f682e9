"""Tiny mixtures of experts and models with latent attention, of the classes that people serve."""

from collections.abc import Callable
from typing import Any

from transformers import (
    Cohere2MoeConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    FlexOlmoConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.support.engine.tiny_models import VOCAB_SIZE, llama4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,  # no multiple of ATen's 64, so that element-wise functions have tails
    "intermediate_size": 40,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 160,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ONE_DENSE: dict[str, Any] = {"first_k_dense_replace": 1, "n_routed_experts": 6, "n_group": 2, "topk_group": 1}
LATENT: dict[str, Any] = {
    **_COMMON,
    **_ONE_DENSE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}
del LATENT["head_dim"]

MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2_moe": lambda: Qwen2MoeConfig(**_COMMON, num_experts=5, shared_expert_intermediate_size=24),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_COMMON, num_experts=5, norm_topk_prob=True),
    "mixtral": lambda: MixtralConfig(**_COMMON, num_local_experts=5),
    "gpt_oss": lambda: GptOssConfig(**_COMMON, num_local_experts=5),  # biases, interleaved gates, transposed weights
    "deepseek_v2": lambda: DeepseekV2Config(**{**LATENT, "q_lora_rank": None}),
    "deepseek_v3": lambda: DeepseekV3Config(**LATENT),
    "glm4_moe": lambda: Glm4MoeConfig(**_COMMON, **_ONE_DENSE),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**LATENT, mlp_layer_types=["dense", "sparse"]),
    "olmoe": lambda: OlmoeConfig(**_COMMON, num_experts=5),
    "phimoe": lambda: PhimoeConfig(**_COMMON, num_local_experts=5),
    "granitemoe": lambda: GraniteMoeConfig(**_COMMON, num_local_experts=5),
    "granitemoeshared": lambda: GraniteMoeSharedConfig(**_COMMON, num_local_experts=5, shared_intermediate_size=24),
    "hunyuan_v1_moe": lambda: HunYuanMoEV1Config(**_COMMON, num_experts=5, moe_topk=2),
    "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(**_COMMON, moe_num_experts=5, moe_k=2),
    "minimax_m2": lambda: MiniMaxM2Config(**_COMMON, num_local_experts=5),
    "dots1": lambda: Dots1Config(**_COMMON, **_ONE_DENSE, n_shared_experts=1),
    "flex_olmo": lambda: FlexOlmoConfig(**_COMMON, num_experts=5),
    "exaone_moe": lambda: ExaoneMoeConfig(**_COMMON, **_ONE_DENSE, num_experts=6, num_shared_experts=1),
    "cohere2_moe": lambda: Cohere2MoeConfig(**_COMMON, num_experts=5, first_k_dense_replace=1),
    "llama4": lambda: llama4(512, 8192),  # all experts in one call, with zeros for rows that another one computes
}
