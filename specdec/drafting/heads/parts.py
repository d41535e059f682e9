"""Modules of heads. Parameters have the checkpoints' names; callers provide attention.

`attend` takes queries [T, heads, d] and new keys and values [T, kv heads, d], and returns [T, heads, d]. It reads a
paged cache in serving (`cache.py`) and the rows themselves in training (`dense_attention`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.engine.model.fused import rotary_tables

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries, keys, values) to attention's output."""


def head_sizes(config: LlamaConfig) -> tuple[int, int, int]:
    """Number of query heads, of key-value heads, and size of a head."""
    num_heads = int(config.num_attention_heads)
    return num_heads, int(config.num_key_value_heads or num_heads), int(config.head_dim or 0)


class RmsNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + epsilon)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm the last dimension, computing in float32."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


class Rotary:
    """Rotary embedding that rotates the halves of a head, with transformers' tables."""

    def __init__(self, config: LlamaConfig, num_positions: int) -> None:
        """Tables for positions below `num_positions`."""
        self._tables = rotary_tables(LlamaRotaryEmbedding(config), num_positions)

    def to(self, device: torch.device) -> Rotary:
        """Move the tables."""
        self._tables = (self._tables[0].to(device), self._tables[1].to(device))
        return self

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate [T, heads, d] by positions [T]."""
        cosines, sines = (table[positions][:, None] for table in self._tables)
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Projections of grouped-query attention, with norms per head where the config has them."""

    def __init__(self, config: LlamaConfig, in_size: int, has_head_norms: bool) -> None:
        super().__init__()
        num_heads, num_kv_heads, self.head_dim = head_sizes(config)
        bias = bool(config.attention_bias)
        width, kv_width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(in_size, width, bias=bias)
        self.k_proj = nn.Linear(in_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(in_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.q_norm = RmsNorm(self.head_dim, config.rms_norm_eps) if has_head_norms else None
        self.k_norm = RmsNorm(self.head_dim, config.rms_norm_eps) if has_head_norms else None

    def keys_values(
        self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values, of rows [T, in_size]: each [T, kv heads, d]."""
        key = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        key = key if self.k_norm is None else self.k_norm(key)
        return rotary(key, positions), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(
        self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """Rows [T, in_size] at positions [T] to [T, hidden]."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        query = query if self.q_norm is None else self.q_norm(query)
        key, value = self.keys_values(x, rotary, positions)
        attended: torch.Tensor = self.o_proj(attend(layer, rotary(query, positions), key, value).flatten(1))
        return attended


class Mlp(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, bool(config.mlp_bias)
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, hidden] to [T, hidden]."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A decoder layer: norm, attention, norm, MLP, with residuals around both."""

    def __init__(self, config: LlamaConfig, has_head_norms: bool, *, has_input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps) if has_input_norm else None
        self.self_attn = Attention(config, config.hidden_size, has_head_norms)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """Rows [T, hidden] at positions [T] to [T, hidden]."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(normed, rotary, positions, layer, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def dense_attention(visible: torch.Tensor) -> Attend:
    """Attention among rows; visible[i, j] (bool [T, T]): row i reads row j."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    return attend
