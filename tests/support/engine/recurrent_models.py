"""Tiny random models with recurrent layers, of the classes that transformers registers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

from tests.support.engine.tiny_models import VOCAB_SIZE, save_random

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA: dict[str, Any] = {
    **_COMMON,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MAMBA: dict[str, Any] = {
    **_COMMON,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}

RECURRENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": lambda: Qwen3NextConfig(**_DELTA, num_experts=0),
    "qwen3_5": lambda: Qwen3_5TextConfig(**_DELTA),
    "olmo_hybrid": lambda: OlmoHybridConfig(**_DELTA),
    "kimi_linear": lambda: KimiLinearConfig(
        **{**_COMMON, "num_key_value_heads": 4},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense"] * 3,
        linear_num_heads=4,
        linear_head_dim=16,
        linear_conv_kernel_dim=4,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **{**_COMMON, "num_hidden_layers": 4},
        layer_types=["mamba", "attention", "mlp", "mamba"],
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
        conv_kernel=4,
        chunk_size=8,
    ),
    "granite_moe_hybrid": lambda: GraniteMoeHybridConfig(
        **_MAMBA,
        mamba_expand=2,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=0,
        shared_intermediate_size=64,
    ),
    "falcon_h1": lambda: FalconH1Config(**_MAMBA, mamba_d_ssm=128, head_dim=16),
    "bamba": lambda: BambaConfig(**_MAMBA, mamba_expand=2, attn_layer_indices=[1]),
    "zamba2": lambda: Zamba2Config(
        **{**_COMMON, "num_hidden_layers": 4},
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_mem_blocks=1,
        mamba_ngroups=2,
        mamba_d_state=16,
        mamba_headdim=16,
        n_mamba_heads=8,
        adapter_rank=8,
        chunk_size=8,
    ),
    "mamba2": lambda: Mamba2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, state_size=16, num_heads=4, head_dim=32, n_groups=2
    ),
    "mamba": lambda: MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, state_size=16),
    "falcon_mamba": lambda: FalconMambaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, state_size=16
    ),
    "jamba": lambda: JambaConfig(
        **{**_COMMON, "num_hidden_layers": 4},
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_dt_rank=8,
    ),
    "lfm2": lambda: Lfm2Config(
        **_COMMON, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8, conv_L_cache=3
    ),
}


def save_recurrent_model(name: str, directory: Path, seed: int = 0) -> Path:
    """Write a tiny model of `RECURRENT` with random weights; returns the directory."""
    return save_random(RECURRENT[name](), directory, seed)
