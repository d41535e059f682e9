"""The decoder classes that transformers registers, with a tiny configuration of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.support.zoo.published import PUBLISHED
from tests.support.zoo.shrinking import tiny_config

_DECODER = {"is_decoder": True}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_HEAD_DIM = {"head_dim": 8}
_SAME_HEADS = {"num_key_value_heads": 4}
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}
_IMAGE_TOKENS = {"vocabulary_map": {"<image>": 4, "IMGIMGA": 5}}

_GIVEN: Mapping[str, Mapping[str, Any]] = {
    "bamba": _MAMBA,
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "chameleon": _IMAGE_TOKENS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_ocr2_text": {**_EXPERTS, "mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
    "deepseek_v2": {**_EXPERTS, "num_key_value_heads": 4},
    "deepseek_vl_hybrid": {"vision_config": {"num_hidden_layers": 1}},
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 16},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1]},
    "blt": {"encoder_hash_byte_group_vocab": 131},
    "dots1": {**_EXPERTS, "num_key_value_heads": 4},
    "emu3": _IMAGE_TOKENS,
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], **_MROPE},
    "gemma3n_text": {"activation_sparsity_pattern": [0.0] * 4},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "index_topk": 16, "qk_rope_head_dim": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        "deepstack_layer_map": [], "spatial_target_layers": [1], "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "granitemoehybrid": _MAMBA,
    "hunyuan_vl": {"vision_config": {"img_max_token_num": 16, "max_image_size": 64, "min_image_size": 16}},
    "inkling_mm_model": {"vision_config": {"patch_size": 4}},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 8, "num_embeddings": 16, "channel_multiplier": [1, 1]},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": {**_CONVOLUTIONS, "num_dense_layers": 1},
    "llama4_vision_model": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 5},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 5},
    "reformer": {**_DECODER, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 12]},
    "roc_bert": {**_DECODER, "shape_vocab_size": 131, "pronunciation_vocab_size": 131},
    "step3p5": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
        "num_sliding_attention_heads": 4, "sliding_window": 12, "mlp_layer_types": ["dense", "sparse"],
    },
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    **dict.fromkeys(
        (
            "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text",
            "glm46v_text",
        ),
        _MROPE,
    ),
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl",
        ),
        _DECODER,
    ),
    **dict.fromkeys(
        (
            "axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
            "longcat_flash", "minicpm3", "mistral4", "mistral_large4_text", "youtu", "bailing_hybrid", "kimi_linear",
        ),
        _SAME_HEADS,
    ),
    **dict.fromkeys(("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe"), _HEAD_DIM),
    "hunyuan_vl_text": {**_HEAD_DIM, **_MROPE},
    "nemotron": {"num_key_value_heads": 2},
}  # fmt: skip
"""What the sizes' names do not tell, by model type: heads that must be equal in number, options without which a class
is no decoder, and values that a class's own configuration lacks."""


_SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "attention only": {"layer_types": ["full_attention", "full_attention"]},
    "linear rope": {"rope_parameters": {**_SCALED, "rope_type": "linear"}},
    "yarn rope": {"rope_parameters": {**_SCALED, "rope_type": "yarn"}},
    "llama3 rope": {
        "rope_parameters": {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "dynamic rope": {"rope_parameters": {**_SCALED, "rope_type": "dynamic"}},
    "long rope": {
        "rope_parameters": {
            **_SCALED, "original_max_position_embeddings": 64, "rope_type": "longrope", "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        }
    },
}  # fmt: skip
"""Other configurations of classes."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model type, and the class that loads its checkpoints."""

    model_type: str
    class_name: str
    variant: str = ""
    """Key of `_VARIANTS` or `PUBLISHED`; "" for the class's own configuration."""

    def config(self) -> PreTrainedConfig:
        """A tiny configuration, as a checkpoint of the class has it."""
        own = {**_GIVEN.get(self.model_type, {}), **_VARIANTS.get(self.variant, {})}
        written = PUBLISHED.get(self.variant)
        given = {**_GIVEN, self.model_type: own if written is None else {**own, **written.tiny}}
        config = tiny_config(CONFIG_MAPPING[self.model_type], given, None if written is None else written.config)
        text = config.get_text_config(decoder=True)
        if type(text) is self.model_class().config_class:
            config = text
        config.architectures = [self.class_name]
        return config

    def model_class(self) -> type[PreTrainedModel]:
        """The class."""
        import transformers

        found: type[PreTrainedModel] = getattr(transformers, self.class_name)
        return found

    def __str__(self) -> str:
        return f"{self.class_name} ({self.model_type}{', ' if self.variant else ''}{self.variant})"


def cases() -> list[Case]:
    """One for each model type and class of the registries for text, and for images and text to text."""
    registered: set[tuple[str, str]] = set()
    for registry in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        registered |= set(registry.items())
    variants = [Case("granitemoehybrid", "GraniteMoeHybridForCausalLM", "attention only")]
    variants += [Case("llama", "LlamaForCausalLM", name) for name in _VARIANTS if name.endswith("rope")]
    return [*(Case(*pair) for pair in sorted(registered)), *variants]


def published_cases() -> list[Case]:
    """One for each of `PUBLISHED`."""
    return [Case(written.config["model_type"], written.class_name, name) for name, written in PUBLISHED.items()]
