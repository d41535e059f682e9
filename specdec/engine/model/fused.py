"""Llama-like decoders as one native call per step.

A small model's step spends more time between kernels than in them. For architectures of norm, attention with rotary
positions, norm and gated SiLU, all weights are repacked into one arena, and the whole step, from embedding to logits,
runs in C++ (``native/decoder.cpp``). The self-test decides: without the logits of the model's dense forward pass it is
not used.
"""

import copy
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.batch import Batch
from specdec.engine.checkpoints.formats import format_of
from specdec.engine.model.mixtures.blocks import weights_of
from specdec.engine.model.mixtures.weights import native_experts
from specdec.engine.model.skipping import has_attention, has_mlp
from specdec.engine.native.experts import NativeExperts
from specdec.engine.native.kernels import AttentionView, BatchView, NativeKernels
from specdec.engine.native.packing import PackedArena, WeightFormat, WeightPacking, WeightView
from specdec.engine.sublayers import SkippedSublayers

_FUSABLE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_FUSABLE_MIXTURES = frozenset({"Qwen3MoeForCausalLM", "MixtralForCausalLM"})
"""Models of Llama's shape whose routers choose by a softmax over all experts."""
_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_TABLE_CHUNK = 4096  # positions per call of the rotary module
_STATUS = {1: "token id", 2: "position"}  # of specdec_decoder_step


class _DecoderLayer(ctypes.Structure):
    """``DecoderLayer`` of decoder.cpp."""

    _fields_ = [
        *((name, _POINTER) for name in ("input_norm", "query_norm", "key_norm", "post_norm")),
        *((name, WeightView) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("qkv_bias", "output_bias", "gate_bias", "up_bias", "down_bias")),
        ("attention", AttentionView),
        ("router", WeightView),
        ("experts", _POINTER),
    ]


class _Decoder(ctypes.Structure):
    """``Decoder`` of decoder.cpp."""

    _fields_ = [
        *((name, _POINTER) for name in ("embedding", "cosines", "sines")),
        ("lm_head", WeightView),
        *((name, _POINTER) for name in ("final_norm", "lm_head_bias")),
        ("layers", ctypes.POINTER(_DecoderLayer)),
        *((name, _INT64) for name in ("num_layers", "hidden", "intermediate", "num_logits")),
        *((name, _INT64) for name in ("num_embeddings", "num_positions", "embedding_is_bfloat16")),
        *((name, _INT64) for name in ("num_experts", "num_chosen", "expert_inner", "is_normalized")),
        ("norm_epsilon", ctypes.c_float),
    ]


def is_fusable(
    model: PreTrainedModel,
    geometries: Sequence[LayerGeometry],
    options: Sequence[AttentionOptions],
    max_head_dim: int,
    *,
    takes_mixtures: bool = False,
) -> bool:
    """Whether a model with these attention calls has the shape of fused decoders."""
    config = model.config
    if not geometries:
        return False
    first = geometries[0]
    return (
        type(model).__name__ in (_FUSABLE | _FUSABLE_MIXTURES if takes_mixtures else _FUSABLE)
        and not format_of(config)
        and type(model).__module__.startswith("transformers.")
        and config.hidden_act == "silu"
        and len(geometries) == sum(map(has_attention, model.model.layers))
        and all(geometry == first for geometry in geometries)
        and first.key_dim == first.value_dim
        and first.key_dim % 2 == 0
        and first.key_dim <= max_head_dim
        and all(option.softcap is None and option.sinks is None for option in options)
    )


class FusedDecoder:
    """Runs a fusable model, without the model's own modules."""

    def __init__(
        self,
        model: PreTrainedModel,
        kernels: NativeKernels,
        geometries: Sequence[LayerGeometry],
        options: Sequence[AttentionOptions],
        max_model_len: int,
    ) -> None:
        """Pack the weights of a model that ``is_fusable`` accepts. Takes them off its modules one by one."""
        self.library = kernels.library
        self._kernels = kernels
        self._kept: list[torch.Tensor] = []  # owners of the memory that the structures point to
        self._cache: KVCache | None = None
        self._workspace = torch.empty(0)
        decoder: Any = model.model
        head: Any = model.lm_head
        layers = list(decoder.layers)
        self.arena = PackedArena(kernels.packing, _packed_bytes(layers, head, kernels.packing))
        self._layers = (_DecoderLayer * len(layers))()
        heads = model.config.num_attention_heads
        calls = zip(geometries, options, strict=True)
        self._mixtures: list[NativeExperts] = []
        self._attending: list[tuple[int, _DecoderLayer]] = []  # (layer of the cache, decoder layer)
        for target, layer in zip(self._layers, layers, strict=True):
            target.attention = _attention_view(heads, geometries[0], options[0])  # sizes for a layer without attention
            if has_attention(layer):
                target.attention = _attention_view(heads, *next(calls))
                self._attending.append((len(self._attending), target))
            self._take_layer(target, layer)
        cosines, sines = rotary_tables(decoder.rotary_emb, max_model_len)
        self.num_logits = int(head.weight.shape[0])
        self.hidden_size = int(model.config.hidden_size)
        embedding = decoder.embed_tokens.weight
        embedding_is_bfloat16 = kernels.packing.fits(embedding, WeightFormat.BFLOAT16)
        self._decoder = _Decoder(
            embedding=self._keep(embedding, torch.bfloat16 if embedding_is_bfloat16 else torch.float32),
            cosines=self._keep(cosines),
            sines=self._keep(sines),
            lm_head=self.arena.pack([head.weight]),
            final_norm=self._keep(decoder.norm.weight),
            lm_head_bias=self._keep(head.bias),
            layers=self._layers,
            num_layers=len(layers),
            hidden=self.hidden_size,
            intermediate=model.config.intermediate_size,
            num_logits=self.num_logits,
            num_embeddings=embedding.shape[0],
            num_positions=max_model_len,
            embedding_is_bfloat16=embedding_is_bfloat16,
            norm_epsilon=model.config.rms_norm_eps,
            **self._mixture_sizes(model.config),
        )

    def __call__(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Logits ``[R, V]`` of a batch; writes its keys and values. Cost: one native call.

        Raises ``IndexError`` for a token id or position outside the model.
        """
        view = BatchView.of(batch, cache.block_size)
        logits = torch.empty(view.num_logits, self.num_logits)
        tap = batch.tap
        if tap is not None:
            tap.states = torch.empty(view.num_rows, len(tap.layer_ids), self.hidden_size)
            layer_ids = (_INT64 * len(tap.layer_ids))(*tap.layer_ids)
            view.tap_layers, view.num_taps = ctypes.addressof(layer_ids), len(tap.layer_ids)
            view.tapped = tap.states.data_ptr()
        self.call(self._kernels.library.specdec_decoder_step, view, view.num_rows, cache, logits)
        return logits

    def without(self, skipped: SkippedSublayers) -> "FusedDecoder":
        """A decoder of the same weights that skips sublayers; the others' keys and values go to the same places. Cost:
        some microseconds. Use it in the same thread as this one.
        """
        other = copy.copy(self)
        kept = [number for number in range(len(self._layers)) if number not in skipped.layers]
        other._layers = (_DecoderLayer * len(kept))(*(self._layers[number] for number in kept))
        places = {ctypes.addressof(layer): index for index, layer in self._attending}
        other._attending = []
        for layer, number in zip(other._layers, kept, strict=True):
            if number in skipped.attention:
                layer.input_norm = None
            if number in skipped.mlp:
                layer.post_norm = None
            place = places.get(ctypes.addressof(self._layers[number]))
            if place is not None:
                other._attending.append((place, layer))
        other._decoder = _Decoder.from_buffer_copy(self._decoder)
        other._decoder.layers, other._decoder.num_layers = other._layers, len(kept)
        other._cache, other._workspace = None, torch.empty(0)
        return other

    def call(
        self,
        function: Callable[..., int],
        argument: ctypes.Structure,
        num_rows: int,
        cache: KVCache,
        logits: torch.Tensor,
    ) -> None:
        """Call a decoder function of the library, for up to ``num_rows`` rows at once.

        Raises ``IndexError`` as ``__call__`` does.
        """
        if cache is not self._cache:
            self._bind(cache)
        needed = self._kernels.library.specdec_decoder_workspace(
            ctypes.byref(self._decoder), num_rows, self._kernels.num_threads
        )
        if needed > self._workspace.shape[0]:
            self._workspace = torch.empty(needed)
        status = function(
            self._kernels.pool,
            ctypes.byref(self._decoder),
            ctypes.byref(argument),
            self._workspace.data_ptr(),
            logits.data_ptr(),
        )
        if status != 0:
            raise IndexError(f"a {_STATUS[status]} is out of the model's range")

    def _bind(self, cache: KVCache) -> None:
        for index, layer in self._attending:
            keys, values = cache.keys[index], cache.values[index]
            layer.attention.keys, layer.attention.values = keys.data_ptr(), values.data_ptr()
        self._cache = cache

    def _take_layer(self, target: _DecoderLayer, layer: Any) -> None:
        for name, weights in _packed_weights(layer).items():
            setattr(target, name, self.arena.pack(weights))
        if has_attention(layer):
            self._take_attention(target, layer)
        if has_mlp(layer):
            self._take_mlp(target, layer)

    def _take_attention(self, target: _DecoderLayer, layer: Any) -> None:
        attention = layer.self_attn
        target.input_norm = self._keep(layer.input_layernorm.weight)
        for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            if hasattr(attention, norm):
                setattr(target, name, self._keep(getattr(attention, norm).weight))
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        if projections[0].bias is not None:
            target.qkv_bias = self._keep(torch.cat([p.bias for p in projections]))
        target.output_bias = self._keep(attention.o_proj.bias)
        for module in (*projections, attention.o_proj):
            module.weight = None

    def _take_mlp(self, target: _DecoderLayer, layer: Any) -> None:
        mlp = layer.mlp
        target.post_norm = self._keep(layer.post_attention_layernorm.weight)
        if _is_mixture(mlp):
            experts = native_experts(self._kernels, weights_of(mlp.experts))
            mlp.experts.gate_up_proj = mlp.experts.down_proj = None
            target.experts = ctypes.addressof(experts.view)
            self._mixtures.append(experts)
            return
        target.down_bias = self._keep(mlp.down_proj.bias)
        target.gate_bias = self._keep(self._padded(mlp.gate_proj.bias))
        target.up_bias = self._keep(self._padded(mlp.up_proj.bias))
        for module in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            module.weight = None

    def _mixture_sizes(self, config: Any) -> dict[str, int]:
        if not self._mixtures:
            return {}
        return {
            "num_experts": max(each.view.num_experts for each in self._mixtures),
            "num_chosen": config.num_experts_per_tok,
            "expert_inner": max(each.view.inner for each in self._mixtures),
            "is_normalized": getattr(config, "norm_topk_prob", True),  # Mixtral always does
        }

    @property
    def has_mixtures(self) -> bool:
        """Whether a layer has experts."""
        return bool(self._mixtures)

    def _keep(self, tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        if tensor is None:
            return None
        own = tensor.detach().to(dtype).contiguous()
        self._kept.append(own)
        return own.data_ptr()

    def _padded(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        if bias is None:
            return None
        return nn.functional.pad(bias.detach(), (0, -bias.shape[0] % self._kernels.packing.panel_width))


def _packed_weights(layer: Any) -> dict[str, list[torch.Tensor]]:
    """Weights of each packed field of a layer; those of one field have one shape, and their panels alternate."""
    attention, mlp = layer.self_attn, layer.mlp
    packed: dict[str, list[torch.Tensor]] = {}
    if has_attention(layer):
        packed["qkv"] = [torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])]
        packed["output"] = [attention.o_proj.weight]
    if has_mlp(layer) and _is_mixture(mlp):
        packed["router"] = [mlp.gate.weight]
    elif has_mlp(layer):
        packed["gate_up"] = [mlp.gate_proj.weight, mlp.up_proj.weight]
        packed["down"] = [mlp.down_proj.weight]
    return packed


def _is_mixture(mlp: Any) -> bool:
    return hasattr(mlp, "experts")


def _packed_bytes(layers: Sequence[Any], head: Any, packing: WeightPacking) -> int:
    of_layers = sum(packing.num_bytes(weights) for layer in layers for weights in _packed_weights(layer).values())
    return of_layers + packing.num_bytes([head.weight])


def _attention_view(num_heads: int, geometry: LayerGeometry, options: AttentionOptions) -> AttentionView:
    return AttentionView(
        num_heads=num_heads,
        num_kv_heads=geometry.num_kv_heads,
        key_dim=geometry.key_dim,
        value_dim=geometry.value_dim,
        sliding_window=options.sliding_window or 0,
        scaling=options.scaling,
        softcap=0.0,
    )


def rotary_tables(
    rotary: Any, num_positions: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[num_positions, head_dim / 2]`` float32 of the model's rotary module, which is on
    ``device``.
    """
    parts = []
    probe = torch.zeros(1, dtype=torch.float32, device=device)
    for start in range(0, num_positions, _TABLE_CHUNK):
        positions = torch.arange(start, min(start + _TABLE_CHUNK, num_positions), device=device)[None]
        cosines, sines = rotary(probe, positions)
        half = cosines.shape[-1] // 2
        parts.append((cosines[0, :, :half], sines[0, :, :half]))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
