"""Enlarges a Llama-like checkpoint without changing what it computes.

The added parts compute, and contribute exactly zero:

* width: the added part of the residual stream is zero, because the embedding's added columns and the added rows of the
  output projections (attention, MLP) are zero. Weights that read it are random;
* heads and MLP rows: random queries, keys, values, gates and ups, whose columns in the output projections are zero;
* layers: random weights, and output projections of zeros;
* vocabulary: copies of the padding token's row. No tokenizer names them, so this system never samples them; another
  system samples one only where padding is the likeliest token.

An RMS norm over a stream that is zero past its old width sees a mean of squares that is smaller by `old / new`. With
`eps' = eps * old / new` and `weight' = weight * sqrt(old / new)` its values stay the same. That root is a power of two
where the width grows by a power of four. Then no weight is rounded and every product keeps its bits; only the order of
sums over more terms changes. Otherwise the checkpoint is written in float32.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_STD = 0.02
_LAYER = "model.layers."
Tensors = dict[str, torch.Tensor]


class InflationImpossible(ValueError):
    """The shape is too small for the model, or the model's family is not in `FAMILIES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes that a checkpoint is enlarged to; the size of a head stays."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    num_positions: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> Shape:
        """The shape in a config."""
        return Shape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            vocab_size=config["vocab_size"],
            num_positions=config["max_position_embeddings"],
        )


class Inflation:
    """A source's weights and their places in the larger shape. Tensors are made on the weights' device."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], shape: Shape, seed: int) -> None:
        """Raises InflationImpossible."""
        if config.get("model_type") not in FAMILIES:
            raise InflationImpossible(f"model_type {config.get('model_type')} is none of {', '.join(FAMILIES)}")
        self._config, self._weights, self._seed = config, weights, seed
        self._old, self._new = Shape.of(config), shape
        _check_larger(self._old, shape)
        self._head_dim = int(config.get("head_dim") or self._old.hidden_size // self._old.num_heads)
        self._heads, self._kv_heads = _place_heads(self._old, shape)
        self._norm_scale = math.sqrt(self._old.hidden_size / shape.hidden_size)
        some = weights["model.embed_tokens.weight"]
        self._device = some.device
        self._dtype = some.dtype if self.is_exact else torch.float32

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the larger checkpoint."""
        return self._dtype

    @property
    def is_exact(self) -> bool:
        """Whether the norms' weights are scaled by a power of two, which rounds nothing."""
        return math.frexp(self._norm_scale)[0] == 0.5

    def config(self) -> dict[str, Any]:
        """The config of the larger checkpoint."""
        new = self._new
        config = {
            **self._config,
            "hidden_size": new.hidden_size,
            "intermediate_size": new.intermediate_size,
            "num_hidden_layers": new.num_layers,
            "num_attention_heads": new.num_heads,
            "num_key_value_heads": new.num_kv_heads,
            "head_dim": self._head_dim,
            "vocab_size": new.vocab_size,
            "max_position_embeddings": new.num_positions,
            "rms_norm_eps": self._config["rms_norm_eps"] * self._old.hidden_size / new.hidden_size,
            "dtype": str(self._dtype).removeprefix("torch."),
        }
        config.pop("torch_dtype", None)
        if kinds := config.get("layer_types"):
            config["layer_types"] = [*kinds, *[kinds[-1]] * (new.num_layers - len(kinds))]
        return config

    def parts(self) -> Iterator[Tensors]:
        """All tensors, in parts of about a layer each, of which one at a time is in memory."""
        yield {"model.embed_tokens.weight": self._embedding("model.embed_tokens.weight")}
        for layer in range(self._new.num_layers):
            yield self._layer(layer)
        last = {"model.norm.weight": self._norm("model.norm.weight", "model.norm.weight")}
        if "lm_head.weight" in self._weights:
            last["lm_head.weight"] = self._head()
        yield last

    def _layer(self, number: int) -> Tensors:
        template = f"{_LAYER}{min(number, self._old.num_layers - 1)}."
        is_added = number >= self._old.num_layers
        tensors: Tensors = {}
        for source in (name for name in self._weights if name.startswith(template)):
            kind = source.removeprefix(template)
            name = f"{_LAYER}{number}.{kind}"
            if kind.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
                tensors[name] = self._norm(name, None if is_added else source)
            elif kind.endswith(("q_norm.weight", "k_norm.weight")):  # norms over a head, whose size stays
                tensors[name] = self._weights[source].to(self._dtype, copy=True)
            else:
                tensors[name] = self._projection(name, kind, source, is_added)
        return tensors

    def _projection(self, name: str, kind: str, source: str, is_added: bool) -> torch.Tensor:
        """A weight or bias of attention or MLP: random, or zeros where it writes to the residual stream."""
        layout = self._layout(kind.split(".")[1])
        old = self._weights[source]
        sizes = layout.sizes[: old.dim()]
        tensor = (
            torch.zeros(sizes, device=self._device, dtype=self._dtype) if layout.writes else self._random(name, sizes)
        )
        if is_added:
            return tensor
        rows = torch.tensor(layout.rows, device=self._device)
        values = old.to(self._dtype)[layout.old_rows]
        if kind.startswith(("self_attn.q_", "self_attn.k_")) and self._normalizes_heads:
            values = values * self._norm_scale
        if old.dim() == 1:
            tensor[rows] = values
        else:
            tensor[rows[:, None], torch.tensor(layout.columns, device=self._device)[None]] = values
        return tensor

    def _layout(self, projection: str) -> _Layout:
        old, new, size = self._old, self._new, self._head_dim
        width, mlp = range(old.hidden_size), range(old.intermediate_size)
        queries = [head * size + i for head in self._heads for i in range(size)]
        keys = [place * size + i for _, place in self._kv_heads for i in range(size)]
        of_keys = [head * size + i for head, _ in self._kv_heads for i in range(size)]
        match projection:
            case "q_proj":
                return _Layout((new.num_heads * size, new.hidden_size), queries, range(len(queries)), width, False)
            case "k_proj" | "v_proj":
                return _Layout((new.num_kv_heads * size, new.hidden_size), keys, of_keys, width, False)
            case "o_proj":
                return _Layout((new.hidden_size, new.num_heads * size), width, width, queries, True)
            case "gate_proj" | "up_proj":
                return _Layout((new.intermediate_size, new.hidden_size), mlp, mlp, width, False)
            case "down_proj":
                return _Layout((new.hidden_size, new.intermediate_size), width, width, mlp, True)
        raise InflationImpossible(f"{projection}: no projection of a Llama-like layer")

    def _norm(self, name: str, source: str | None) -> torch.Tensor:
        tensor = 1 + self._random(name, (self._new.hidden_size,))
        if source is not None:
            tensor[: self._old.hidden_size] = self._weights[source].to(self._dtype) * self._norm_scale
        return tensor

    def _embedding(self, source: str) -> torch.Tensor:
        new, old = self._new, self._weights[source].to(self._dtype)
        tensor = torch.zeros((new.vocab_size, new.hidden_size), device=self._device, dtype=self._dtype)
        tensor[: old.shape[0], : old.shape[1]] = old
        tensor[old.shape[0] :, : old.shape[1]] = old[self._padding]
        return tensor

    def _head(self) -> torch.Tensor:
        new, old = self._new, self._weights["lm_head.weight"].to(self._dtype)
        tensor = self._random("lm_head.weight", (new.vocab_size, new.hidden_size))
        tensor[: old.shape[0], : old.shape[1]] = old
        tensor[old.shape[0] :, : old.shape[1]] = old[self._padding]
        return tensor

    @property
    def _normalizes_heads(self) -> bool:
        """Whether queries and keys have norms, which use the same `eps'`, so that their inputs must be scaled."""
        return f"{_LAYER}0.self_attn.q_norm.weight" in self._weights

    @property
    def _padding(self) -> int:
        return int(self._config.get("pad_token_id") or 0)

    def _random(self, name: str, sizes: Sequence[int]) -> torch.Tensor:
        """Random values that depend on the seed and the name alone."""
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little"))
        tensor = torch.empty(tuple(sizes), device=self._device, dtype=self._dtype)
        return tensor.normal_(0.0, _STD, generator=generator)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Places of the rows and columns of a source's projection in the larger one."""

    sizes: tuple[int, int]
    rows: Sequence[int]
    old_rows: Sequence[int]
    """Source row of each of `rows`."""
    columns: Sequence[int]
    writes: bool
    """Whether it writes to the residual stream, so that the added weights are zero."""


def _place_heads(old: Shape, new: Shape) -> tuple[list[int], list[tuple[int, int]]]:
    """The new place of every head, and (head, place) of every KV head.

    Heads still share their KV head; where the new groups are smaller, KV heads are repeated.
    """
    old_group, new_group = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    num_copies = -(-old_group // new_group)
    if old.num_kv_heads * num_copies > new.num_kv_heads:
        raise InflationImpossible(f"{new.num_kv_heads} KV heads are too few for {new_group} heads at each")
    heads = []
    for head in range(old.num_heads):
        group, within = divmod(head, old_group)
        heads.append((group * num_copies + within // new_group) * new_group + within % new_group)
    kv_heads = [(head, head * num_copies + copy) for head in range(old.num_kv_heads) for copy in range(num_copies)]
    return heads, kv_heads


def _check_larger(old: Shape, new: Shape) -> None:
    for name in Shape.__slots__:
        if getattr(new, name) < getattr(old, name):
            raise InflationImpossible(f"{name}: {getattr(new, name)} is less than the source's {getattr(old, name)}")
    if new.num_heads % new.num_kv_heads:
        raise InflationImpossible(f"num_heads: {new.num_heads} is no multiple of {new.num_kv_heads} KV heads")


def describe(shape: Shape) -> str:
    """A shape as JSON, for the digest in the cache folder's name."""
    return json.dumps({name: getattr(shape, name) for name in Shape.__slots__}, sort_keys=True)
