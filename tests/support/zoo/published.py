"""Configurations as real checkpoints have them, which differ from their classes' defaults.

Only values that change what is computed are here, under the names that the checkpoints' config.json have, old ones
included: windows, rope, scales, biases, norms, lists by layer. Sizes are shrunk (`shrinking.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint's configuration."""

    class_name: str
    config: Mapping[str, Any]
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """Values of the tiny configuration that no rule of shrinking gives."""
    refused: str = ""
    """Part of the engine's error; "": it is served exactly."""


_YARN: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_SLIDING_4: list[str] = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LONG: dict[str, Any] = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 3.0, 6.0, 9.0]}

PUBLISHED: Mapping[str, Published] = {
    "Llama 3.2 1B": Published(
        "LlamaForCausalLM",
        {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": {**_LLAMA3, "factor": 32.0},
         "tie_word_embeddings": True, "num_hidden_layers": 16},
    ),
    "Llama with biases": Published(
        "LlamaForCausalLM", {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}
    ),
    "Llama with relu": Published("LlamaForCausalLM", {"model_type": "llama", "hidden_act": "relu2"}),
    "DeepSeek Coder 6.7B": Published(
        "LlamaForCausalLM",
        {"model_type": "llama", "rope_theta": 100000, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "Mistral 7B v0.1": Published(
        "MistralForCausalLM", {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0}
    ),
    "Mistral Nemo": Published(
        "MistralForCausalLM",
        {"model_type": "mistral", "head_dim": 128, "sliding_window": None, "rope_theta": 1000000.0},
    ),
    "Mixtral 8x7B": Published("MixtralForCausalLM", {"model_type": "mixtral", "sliding_window": 4096}),
    "Ministral 3": Published(
        "Ministral3ForCausalLM",
        {"model_type": "ministral3", "sliding_window": None,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
                             "original_max_position_embeddings": 16384}},
    ),
    "Qwen2.5 with its window": Published(
        "Qwen2ForCausalLM",
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 131072, "max_window_layers": 1,
         "num_hidden_layers": 3},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_hidden_layers": 3},
    ),
    "Qwen2.5 with yarn": Published("Qwen2ForCausalLM", {"model_type": "qwen2", "rope_scaling": _YARN}),
    "Qwen3 0.6B": Published(
        "Qwen3ForCausalLM", {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 1000000}
    ),
    "Qwen3 with yarn": Published(
        "Qwen3ForCausalLM", {"model_type": "qwen3", "rope_scaling": {**_YARN, "rope_type": "yarn"}}
    ),
    "Qwen3 30B-A3B": Published(
        "Qwen3MoeForCausalLM",
        {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
         "rope_theta": 1000000.0},
    ),
    "Qwen1.5-MoE": Published(
        "Qwen2MoeForCausalLM",
        {"model_type": "qwen2_moe", "decoder_sparse_step": 1, "norm_topk_prob": False, "use_sliding_window": False},
    ),
    "Qwen3-Next 80B": Published(
        "Qwen3NextForCausalLM",
        {"model_type": "qwen3_next", "full_attention_interval": 4, "partial_rotary_factor": 0.25,
         "rope_theta": 10000000, "decoder_sparse_step": 1, "norm_topk_prob": True},
    ),
    "Gemma 2 27B": Published(
        "Gemma2ForCausalLM",
        {"model_type": "gemma2", "query_pre_attn_scalar": 144, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0, "sliding_window": 4096},
    ),
    "Gemma 3 27B": Published(
        "Gemma3ForConditionalGeneration",
        {"model_type": "gemma3",
         "text_config": {"model_type": "gemma3_text", "query_pre_attn_scalar": 168, "sliding_window": 1024,
                         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "num_hidden_layers": 7}},
    ),
    "Gemma 3 1B": Published(
        "Gemma3ForCausalLM",
        {"model_type": "gemma3_text", "sliding_window_pattern": 6, "rope_local_base_freq": 10000,
         "rope_theta": 1000000, "sliding_window": 512, "final_logit_softcapping": None, "num_hidden_layers": 7},
    ),
    "EmbeddingGemma": Published(
        "Gemma3ForCausalLM",
        {"model_type": "gemma3_text", "use_bidirectional_attention": True, "sliding_window": 512},
        {"sliding_window": 12},
        refused="no causal mask|mask is no",
    ),
    "Phi-3 mini 128k": Published(
        "Phi3ForCausalLM",
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", **_LONG}, "original_max_position_embeddings": 4096,
         "max_position_embeddings": 131072, "sliding_window": 262144},
    ),
    "Phi-4 mini": Published(
        "Phi3ForCausalLM",
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", **_LONG}, "partial_rotary_factor": 0.75,
         "original_max_position_embeddings": 4096, "max_position_embeddings": 131072, "tie_word_embeddings": True},
    ),
    "Phi-3.5 MoE": Published(
        "PhimoeForCausalLM",
        {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True, "sliding_window": 131072,
         "rope_scaling": {"type": "longrope", "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
                          "original_max_position_embeddings": 4096, **_LONG}},
    ),
    "Granite 3.3 8B": Published(
        "GraniteForCausalLM",
        {"model_type": "granite", "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
         "logits_scaling": 16.0, "residual_multiplier": 0.22, "rope_theta": 10000000.0},
    ),
    "Granite 4 H small": Published(
        "GraniteMoeHybridForCausalLM",
        {"model_type": "granitemoehybrid", "position_embedding_type": "nope", "attention_multiplier": 0.0078125,
         "embedding_multiplier": 12, "logits_scaling": 16, "residual_multiplier": 0.22, "num_hidden_layers": 4,
         "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    "Command R+": Published(
        "CohereForCausalLM",
        {"model_type": "cohere", "logit_scale": 0.8333, "use_qk_norm": True, "rope_theta": 75000000.0},
    ),
    "Command A": Published(
        "Cohere2ForCausalLM",
        {"model_type": "cohere2", "logit_scale": 0.25, "sliding_window": 4096, "num_hidden_layers": 4,
         "sliding_window_pattern": 4, "rope_theta": 50000},
    ),
    "DeepSeek V2 Lite": Published(
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy",
         "scoring_func": "softmax", "routed_scaling_factor": 1.0, "norm_topk_prob": False,
         "rope_scaling": {**_DEEPSEEK["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707}},
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "DeepSeek V2": Published(
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "scoring_func": "softmax",
         "routed_scaling_factor": 16.0, "norm_topk_prob": False},
        {"n_group": 2, "topk_group": 1},
    ),
    "DeepSeek V3.1": Published(
        "DeepseekV3ForCausalLM", {**_DEEPSEEK, "model_type": "deepseek_v3"}, {"n_group": 2, "topk_group": 1}
    ),
    "Kimi K2": Published(
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "model_type": "deepseek_v3", "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
         "rope_scaling": {**_DEEPSEEK["rope_scaling"], "factor": 32.0, "beta_fast": 1.0}},
    ),
    "GLM 4.5": Published(
        "Glm4MoeForCausalLM",
        {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
         "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_theta": 1000000},
    ),
    "GLM 4 0414": Published(
        "Glm4ForCausalLM", {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": True}
    ),
    "gpt-oss 20B": Published(
        "GptOssForCausalLM",
        {"model_type": "gpt_oss", "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True,
         "rope_theta": 150000, "num_hidden_layers": 4,
         "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                          "original_max_position_embeddings": 4096}},
    ),
    "SmolLM3": Published(
        "SmolLM3ForCausalLM",
        {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4, "use_sliding_window": False},
    ),
    "EXAONE 4 32B": Published(
        "Exaone4ForCausalLM",
        {"model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": "LLLG", "num_hidden_layers": 4,
         "layer_types": _SLIDING_4, "rope_scaling": {**_LLAMA3, "factor": 16.0}},
    ),
    "OLMo 3 with yarn": Published(
        "Olmo3ForCausalLM",
        {"model_type": "olmo3", "sliding_window": 4096, "num_hidden_layers": 4, "layer_types": _SLIDING_4,
         "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836, "beta_fast": 32.0,
                          "beta_slow": 1.0, "original_max_position_embeddings": 8192}},
    ),
    "OLMo with clipping": Published("OlmoForCausalLM", {"model_type": "olmo", "clip_qkv": 0.5}),
    "HunYuan 7B": Published(
        "HunYuanDenseV1ForCausalLM",
        {"model_type": "hunyuan_v1_dense", "use_qk_norm": True,
         "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0,
                          "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "MiniMax M2": Published(
        "MiniMaxM2ForCausalLM",
        {"model_type": "minimax_m2", "rotary_dim": 64, "use_qk_norm": True, "qk_norm_type": "per_layer",
         "scoring_func": "sigmoid", "use_routing_bias": True, "rope_theta": 5000000},
    ),
    "Apertus 8B": Published(
        "ApertusForCausalLM", {"model_type": "apertus", "hidden_act": "xielu", "qk_norm": True, "rope_scaling": _LLAMA3}
    ),
    "Seed-OSS 36B": Published(
        "SeedOssForCausalLM", {"model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False}
    ),
    "StableLM 2 12B": Published(
        "StableLmForCausalLM",
        {"model_type": "stablelm", "use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.25,
         "use_qkv_bias": False},
    ),
    "StableLM 2 1.6B": Published(
        "StableLmForCausalLM", {"model_type": "stablelm", "use_qkv_bias": True, "partial_rotary_factor": 0.25}
    ),
    "Starcoder2 3B": Published(
        "Starcoder2ForCausalLM", {"model_type": "starcoder2", "sliding_window": 4096, "use_bias": True}
    ),
    "Pythia 1.4B": Published(
        "GPTNeoXForCausalLM", {"model_type": "gpt_neox", "rotary_pct": 0.25, "use_parallel_residual": True}
    ),
    "RedPajama 3B": Published(
        "GPTNeoXForCausalLM",
        {"model_type": "gpt_neox", "rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": True},
    ),
    "GPT-2 with scales by layer": Published(
        "GPT2LMHeadModel",
        {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True, "n_layer": 3},
    ),
    "GPT-2 without scales": Published("GPT2LMHeadModel", {"model_type": "gpt2", "scale_attn_weights": False}),
    "OPT 350M": Published(
        "OPTForCausalLM",
        {"model_type": "opt", "do_layer_norm_before": False, "_remove_final_layer_norm": False},
        {"word_embed_proj_dim": 16},
    ),
    "SantaCoder": Published("GPTBigCodeForCausalLM", {"model_type": "gpt_bigcode", "multi_query": True}),
    "Phi-2": Published("PhiForCausalLM", {"model_type": "phi", "partial_rotary_factor": 0.5, "qk_layernorm": False}),
    "Nemotron-H 8B": Published(
        "NemotronHForCausalLM",
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-M-", "n_groups": 8, "mlp_hidden_act": "relu2",
         "num_hidden_layers": 7},
    ),
    "Falcon-H1 1.5B": Published(
        "FalconH1ForCausalLM",
        {"model_type": "falcon_h1", "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
         "embedding_multiplier": 5.656854249492381, "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625,
         "mamba_norm_before_gate": False, "mamba_rms_norm": False, "ssm_in_multiplier": 1.25,
         "ssm_out_multiplier": 0.23570226039551587, "rope_theta": 100000000000.0,
         "mlp_multipliers": [0.8838834764831844, 0.5859375],
         "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]},
    ),
    "LFM2 1.2B": Published(
        "Lfm2ForCausalLM",
        {"model_type": "lfm2", "full_attn_idxs": [1, 3], "num_hidden_layers": 4, "conv_bias": True,
         "block_auto_adjust_ff_dim": True, "conv_L_cache": 3},
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4},
    ),
    "Kimi Linear 48B": Published(
        "KimiLinearForCausalLM",
        {"model_type": "kimi_linear", "num_hidden_layers": 4, "first_k_dense_replace": 1,
         "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 32,
                                "short_conv_kernel_size": 4}},
    ),
    "Mamba-Codestral 7B": Published(
        "Mamba2ForCausalLM", {"model_type": "mamba2", "n_groups": 8, "use_bias": False, "tie_word_embeddings": False}
    ),
    "Mistral Small 3.1": Published(
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral3",
         "text_config": {"model_type": "mistral", "head_dim": 128, "sliding_window": None, "rope_theta": 1e9}},
    ),
    "Qwen2.5-VL 3B": Published(
        "Qwen2_5_VLForConditionalGeneration",
        {"model_type": "qwen2_5_vl", "tie_word_embeddings": True,
         "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1000000.0},
    ),
    "Llama 4 Scout": Published(
        "Llama4ForConditionalGeneration",
        {"model_type": "llama4",
         "text_config": {"model_type": "llama4_text", "attn_temperature_tuning": True, "floor_scale": 8192,
                         "attention_chunk_size": 8192, "use_qk_norm": True, "interleave_moe_layer_step": 1,
                         "no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4,
                         "rope_scaling": {**_LLAMA3, "factor": 16.0}}},
    ),
}  # fmt: skip
