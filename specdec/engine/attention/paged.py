"""Attention over the paged KV cache, called by unmodified transformers models.

transformers looks attention up by name in its registry. ``register_paged_attention`` adds one stateless function. Batch
metadata, cache and kernel reach it with every forward pass as the keyword argument ``CONTEXT_KWARG``. No mask function
is registered, so that models build no masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from specdec.engine.attention.declared_masks import DeclaredMask
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.latent import latent_heads_of
from specdec.engine.batch import Batch

ATTENTION_NAME = "specdec_paged"
CONTEXT_KWARG = "specdec_context"
_WITHOUT_EFFECT = frozenset(
    {
        CONTEXT_KWARG,
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)
"""Keyword arguments without effect on a causal model without dropout and a cache of its own."""


class AttentionError(RuntimeError):
    """The model called the attention function in a way that the engine cannot serve."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A layer's options of attention."""

    scaling: float
    sliding_window: int | None = None
    """The row at position p reads positions p - sliding_window + 1 to p."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: torch.Tensor | None = None
    """[num_heads] one more logit per head, without a value."""
    values_in_keys: bool = False
    """See ``LayerGeometry``."""


class ContextDropped(AttentionError):
    """A layer does not pass keyword arguments on to its attention."""


class AttentionKernel(Protocol):
    """Writes a batch's keys and values into the cache, then attends.

    Guarantee: a row attends to positions ``0..position`` of its own sequence, in order of position, whatever their
    slots.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        context: "ForwardContext",
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Take query ``[T, num_heads, key_dim]``, key and value ``[T, num_kv_heads, dim]``; return
        ``[T, num_heads, value_dim]`` in the query's dtype.
        """


@dataclass(slots=True)
class ForwardContext:
    """Attention's data of one forward pass."""

    batch: Batch
    cache: KVCache | None
    kernel: AttentionKernel
    layers: Sequence[int] | None = None
    """KV layers of the pass's attention calls, in order; None: all layers."""
    mask_windows: Sequence[int | None] = ()
    """By KV layer, a window that the model declares only in its mask; empty: no layer does."""
    num_calls: int = 0
    """Attention calls so far: the ordinal names the KV layer."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """Values that a kernel computes once per pass."""


class RecordingKernel:
    """Records the geometry and options of each attention call; computes nothing."""

    def __init__(self) -> None:
        self.geometries: list[LayerGeometry] = []
        self.options: list[AttentionOptions] = []

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        context: ForwardContext,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Return zeros of the right shape."""
        self.geometries.append(LayerGeometry(key.shape[1], key.shape[2], value.shape[2], options.values_in_keys))
        self.options.append(options)
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def register_paged_attention() -> None:
    """Make ``ATTENTION_NAME`` known to transformers. May be called any number of times."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | DeclaredMask | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query ``[1, H, T, D]``, key and value ``[1, Hkv, T, D]``.

    Returns ``[1, T, H, value_dim]`` and no weights. Raises ``AttentionError`` if the layer dropped the context, passes
    its own mask, or uses an unknown option.
    """
    context: ForwardContext | None = kwargs.get(CONTEXT_KWARG)
    if context is None:
        raise ContextDropped(f"{type(module).__name__} drops the keyword arguments of the forward pass")
    unknown = sorted(name for name in kwargs.keys() - _WITHOUT_EFFECT if kwargs[name] is not None)
    if unknown or kwargs.get("is_causal") is False:
        raise AttentionError(f"{type(module).__name__} asks its attention for {', '.join(unknown) or 'no causal mask'}")
    if query.shape[0] != 1 or query.shape[2] != context.batch.input_ids.shape[0]:
        raise AttentionError(f"{type(module).__name__} reshapes the batch: queries are {tuple(query.shape)}")
    layer = context.num_calls if context.layers is None else context.layers[context.num_calls]
    context.num_calls += 1
    sliding_window = _window_of(module, sliding_window or None, attention_mask, layer, context)
    latent = latent_heads_of(module)
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap or None,
        sinks=s_aux,
        values_in_keys=latent is not None,
    )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, dim]
    if latent is None:
        return context.kernel(query, key, value, layer, context, options).unsqueeze(0), None
    out = context.kernel(latent.query(query), key, value, layer, context, options)
    return latent.result(out).unsqueeze(0), None


def _window_of(
    module: nn.Module,
    window: int | None,
    mask: torch.Tensor | DeclaredMask | None,
    layer: int,
    context: ForwardContext,
) -> int | None:
    """The window of a layer, from the keyword argument or from its declared mask. Raises ``AttentionError``."""
    if mask is None:
        return context.mask_windows[layer] if context.mask_windows else window
    if not isinstance(mask, DeclaredMask):
        raise AttentionError(f"{type(module).__name__} brings an attention mask of its own")
    if mask.other:
        raise AttentionError(mask.other)
    return mask.window


def cache_of(context: ForwardContext) -> KVCache:
    """The pass's cache. Raises ``AttentionError`` if it has none."""
    if context.cache is None:
        raise AttentionError("the forward pass has no KV cache")
    return context.cache
