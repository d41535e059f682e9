"""Shrinks any configuration of transformers to a tiny one with the same structure.

A size is known by its name. Of the layers, one of each kind is kept: the first with each combination of the values that
the configuration lists by layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import PreTrainedConfig

VOCAB_SIZE = 131  # prime, so that it is a multiple of no vector's length
CONTEXT = 96
"""Tokens of a tiny model's context."""
WINDOW = 12
"""Tokens of every window."""
HIDDEN, _HEAD, _INNER = 32, 8, 48
_NUM_LAYERS = 2

_BY_VALUE: Mapping[int | float, str] = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input decoder_vocab_size n_token",
    CONTEXT: "max_position_embeddings n_positions max_seq_len model_max_length context_length n_ctx",
    HIDDEN: """
        hidden_size d_model n_embd emb_dim embed_dim word_embed_proj_dim embedding_size out_hidden_size
        projection_dim hidden_dim backbone_hidden_size encoder_hidden_size projector_hidden_size
        text_hidden_size hidden_sizes moe_hidden_size hidden_size_global adapter_in_dim adapter_input_size
        vision_hidden_size image_text_hidden_size d_kv adapter_out_dim
    """,
    _INNER: """
        intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff dff intermediate_size_mlp n_inner
        ffn_hidden_size dense_intermediate_size prefix_dense_intermediate_size mlp_dim d_ff
        projection_hidden_size alignment_intermediate_size
    """,
    16: """
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size qk_head_dim image_size q_lora_rank
        kv_lora_rank o_lora_rank original_max_position_embeddings
    """,
    _HEAD: """
        head_dim dim_head v_head_dim qk_rope_head_dim qk_nope_head_dim index_head_dim indexer_head_dim
        swa_head_dim kv_channels hidden_size_per_layer_input ple_embed_dim laurel_rank global_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim attention_head_dim swa_v_head_dim
        mamba_d_state ssm_state_size state_size rotary_dim hc_lowrank canvas_length
    """,
    4: """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        attention_heads num_experts num_local_experts n_routed_experts moe_num_experts patch_size
        swa_num_attention_heads index_n_heads indexer_n_heads linear_num_value_heads linear_num_heads
        num_encoder_attention_heads num_decoder_attention_heads zero_expert_num num_query_tokens
        latent_query_num index_topk rank d_rel gated_norm_rank mamba_chunk_size chunk_size
    """,
    2: """
        num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_k top_k
        top_k_experts linear_num_key_heads max_window_layers num_global_key_value_heads
    """,
    1: """
        n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts mamba_n_groups n_groups
        depth depths num_expert_group o_groups first_k_dense_replace num_dense_layers num_ln_in_parallel_attn
        moe_layer_start_index
    """,
    0: """
        num_mtp_layers num_nextn_predict_layers pad_token_id num_kv_shared_layers hidden_dropout_prob
        attention_probs_dropout_prob layerdrop dropout attention_dropout
    """,
    WINDOW: """
        sliding_window sliding_window_size attention_window_size window_size local_attention keep_window_size
        attention_chunk_size local_attention_window_len
    """,
    0.2: "initializer_range init_std initializer_factor",
}
_SIZES: Mapping[str, float] = {name: value for value, names in _BY_VALUE.items() for name in names.split()}
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
    "num_decoder_layers",
)  # fmt: skip


def tiny_config(
    kind: type[PreTrainedConfig], given: Mapping[str, Mapping[str, Any]], written: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """A tiny configuration of a class.

    Args:
        given: values that no rule gives, by model type, also of nested ones.
        written: the content of a config.json, whose structure is kept; else the class's own defaults.
    """
    try:
        whole = kind(**(written or {}))
    except StrictDataclassClassValidationError:  # its own defaults contradict each other
        whole = kind(**given[kind.model_type])
    return kind(**_sizes(whole, given))


def _sizes(whole: PreTrainedConfig, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments that make a tiny configuration like `whole`."""
    names = {field.name for field in dataclasses.fields(whole)}  # type: ignore[arg-type]
    values = _not_default(whole, names)
    for name in names:
        value = vars(whole).get(name)
        if isinstance(value, PreTrainedConfig):
            values[name] = {**_sizes(value, given), "model_type": value.model_type}
        elif name in _SIZES and value is not None:
            values[name] = _like(value, _SIZES[name])
        elif name == "rope_parameters" and value:
            values[name] = _tiny_rope(value)
    values |= dict.fromkeys(names & {"bos_token_id", "eos_token_id"}, 1)
    own = given.get(whole.model_type, {})
    values |= _kept_layers(whole, {**vars(whole), **values}, names, own)
    for name, value in own.items():
        is_part = isinstance(value, Mapping) and isinstance(vars(whole).get(name), PreTrainedConfig)
        values[name] = {**values[name], **value} if is_part else value
    return values


def _not_default(whole: PreTrainedConfig, names: set[str]) -> dict[str, Any]:
    """Values of its own, without those of nested configurations."""
    try:
        default = vars(type(whole)())
    except StrictDataclassClassValidationError:
        return {}
    found = {name: value for name in names if not isinstance(value := vars(whole).get(name), PreTrainedConfig)}
    return {name: value for name, value in found.items() if value is not None and value != default.get(name)}


def _like(value: Any, size: float) -> Any:
    return [_like(one, size) for one in value] if isinstance(value, list | tuple) else type(value)(size)


def _tiny_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters, by layer type or not, that switch within the context."""
    small: dict[str, Any] = {"original_max_position_embeddings": 16, "mrope_section": [1, 1, 2]}
    if "long_factor" in parameters:
        num_factors = int(_HEAD * parameters.get("partial_rotary_factor", 1.0)) // 2
        small["original_max_position_embeddings"] = 64
        small |= {name: parameters[name][:num_factors] for name in ("short_factor", "long_factor")}
    return {
        name: _tiny_rope(value) if isinstance(value, Mapping) else small.get(name, value)
        for name, value in parameters.items()
    }


def _kept_layers(
    whole: PreTrainedConfig, values: Mapping[str, Any], names: set[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The number of layers, and each list by layer, with one layer of each kind."""
    counts = {name: count for name in _LAYERS if name in names and isinstance(count := vars(whole).get(name), int)}
    if not counts:
        return {}
    count = next(iter(counts.values()))
    lists = {name: values[name] for name in names if _is_list_of(values.get(name), count)}
    numbered = [name for name, value in lists.items() if list(value) == list(range(count))]
    for name in numbered:
        del lists[name]
    kinds: dict[tuple[str, ...], int] = {}
    for layer in range(count):
        kinds.setdefault(tuple(str(values[layer]) for values in lists.values()), layer)
    kept = list(kinds.values())
    kept += [layer for layer in range(count) if layer not in kept][: max(0, _NUM_LAYERS - len(kept))]
    kept.sort()
    return {
        **dict.fromkeys(counts, len(kept)),
        **{name: [value[layer] for layer in kept] for name, value in lists.items()},
        **{name: list(range(len(kept))) for name in numbered},
        **_own_sizes(whole, kept, {**_SIZES, **given}),
    }


def _is_list_of(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count


def _own_sizes(whole: PreTrainedConfig, kept: list[int], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that single layers have: twice the others' head sizes, so that they are told apart."""
    given: dict[str, dict[str, Any]] = whole.to_dict().get("per_layer_config") or {}
    own = {
        f"{number:02}": {name: int(sizes[name]) * (2 if name == "head_dim" else 1) for name in given[f"{layer:02}"]}
        for number, layer in enumerate(kept)
        if f"{layer:02}" in given
    }
    return {"per_layer_config": own} if own else {}
