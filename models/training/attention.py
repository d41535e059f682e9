"""Causal attention that is cheap to train on a CPU.

PyTorch's CPU flash attention has a slow backward pass: it was a third of a training step here.
Splitting the queries into blocks, each against the keys up to its own end, skips almost half of
the score matrix, keeps every product a plain matrix multiplication (AMX in bfloat16) and lets
the compiler fuse scale, mask and softmax: 2.5 times faster, forward and backward together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

BLOCK_TOKENS = 128
IMPLEMENTATION = "causal_blocks"


def causal_blocks_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Full causal attention over unpadded, uncached sequences.

    ``query`` is (batch, heads, tokens, head_dim); ``key`` and ``value`` have ``kv_heads``
    heads. Returns the output as (batch, tokens, heads, head_dim), and no weights.
    The signature is that of transformers' attention interface; the mask is ignored
    because every sequence is whole.
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    num_tokens = query.shape[2]
    positions = torch.arange(num_tokens)
    outputs = []
    for start in range(0, num_tokens, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, num_tokens)
        scores = query[:, :, start:end] @ key[:, :, :end].transpose(-1, -2) * scale
        future = positions[None, :end] > positions[start:end, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        outputs.append(weights.to(value.dtype) @ value[:, :, :end])
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def register() -> str:
    """Make the function known to transformers and return the name to load models with."""
    AttentionInterface.register(IMPLEMENTATION, causal_blocks_attention)
    return IMPLEMENTATION
