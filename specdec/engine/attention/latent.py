"""Latent attention (MLA): the cache holds one latent per token in place of every head's key and value.

A head's keys and values are products of the latent. Its query is multiplied by the key's weight once, so that it reads
latents directly; the sum of latents is multiplied by the value's weight. Scores and results are the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

LATENT_VERSION = 1
"""Part of the numerics id of models with latents: raise it whenever their bits change and others' do not."""
_NAME = "specdec_latent"


class HeadProduct(Protocol):
    """A product with one weight ``[N, K]`` per head."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply ``[T, H, K]`` into ``[T, H, N]``; the last dimension of both is dense."""


class HeadPacker(Protocol):
    """Packs weights ``[H, N, K]`` for a kernel."""

    def __call__(self, weights: torch.Tensor) -> HeadProduct:
        """Return the product, without references to the originals."""


class BatchedProduct:
    """A product in torch. Not row-invariant."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``HeadProduct``."""
        out.copy_(torch.bmm(x.transpose(0, 1), self._weights.transpose(1, 2)).transpose(0, 1))


class LatentHeads:
    """The products of one attention layer between its heads and latents."""

    def __init__(self, weight: torch.Tensor, key_dim: int, value_dim: int) -> None:
        """``weight`` ``[H * (key_dim + value_dim), rank]``: each head's key without positions, then its value."""
        keys, values = weight.unflatten(0, (-1, key_dim + value_dim)).split([key_dim, value_dim], dim=1)
        self._key_dim, self._value_dim = key_dim, value_dim
        self._rank = int(weight.shape[1])
        self._weights: list[torch.Tensor] = [keys.transpose(1, 2), values]
        self._to_latent: HeadProduct = BatchedProduct(self._weights[0])
        self._from_latent: HeadProduct = BatchedProduct(self._weights[1])

    def pack(self, pack: HeadPacker) -> None:
        """Replace the products by a kernel's, and drop the weights."""
        self._to_latent, self._from_latent = (pack(each) for each in self._weights)
        self._weights = []

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """Queries ``[T, H, rank + positional]`` of heads ``[T, H, key_dim + positional]``."""
        rest = query[..., self._key_dim :]
        out = query.new_empty(*query.shape[:2], self._rank + rest.shape[-1])
        self._to_latent(query[..., : self._key_dim], out[..., : self._rank])
        out[..., self._rank :] = rest
        return out

    def result(self, latents: torch.Tensor) -> torch.Tensor:
        """The heads' results ``[T, H, value_dim]`` of sums of latents ``[T, H, rank]``."""
        out = latents.new_empty(*latents.shape[:2], self._value_dim)
        self._from_latent(latents, out)
        return out


def latent_heads_of(module: nn.Module) -> LatentHeads | None:
    """A layer's products, if ``cache_latents`` has changed it."""
    return module.__dict__.get(_NAME)


def latent_modules(model: nn.Module) -> Iterator[Any]:
    """All attention modules with a plain product that expands latents."""
    for module in model.modules():
        expanding = getattr(module, "kv_b_proj", None)
        if hasattr(module, "expand_kv") and type(expanding) is nn.Linear and expanding.bias is None:
            yield module


def cache_latents(model: nn.Module) -> None:
    """Make a model's layers give latents to their attention function, in place."""
    for module in latent_modules(model):
        if latent_heads_of(module) is None:
            weight = module.kv_b_proj.weight.detach()
            setattr(module, _NAME, LatentHeads(weight, module.qk_nope_head_dim, module.v_head_dim))
            module.expand_kv = _as_latents


def pack_latents(model: nn.Module, pack: HeadPacker) -> int:
    """Pack the products of a model's layers with latents, and drop their weights. Returns the number of layers."""
    changed = [module for module in latent_modules(model) if latent_heads_of(module) is not None]
    for module in changed:
        heads = latent_heads_of(module)
        if heads is not None:
            heads.pack(pack)
        module.kv_b_proj = None
    return len(changed)


def _as_latents(latents: torch.Tensor, positional: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[1, 1, T, dim]``; the values are the keys' first numbers."""
    keys = torch.cat((latents, positional), dim=-1)
    return keys, keys[..., : latents.shape[-1]]
