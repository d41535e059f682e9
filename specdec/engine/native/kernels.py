"""Calls the native kernels on tensors, which are float32 on the CPU unless stated otherwise."""

import ctypes
import weakref
from collections.abc import Sequence

import torch

from specdec.engine.attention.paged import AttentionOptions, ForwardContext, cache_of
from specdec.engine.attention.torch_kernels import TiledAttention
from specdec.engine.batch import Batch
from specdec.engine.native.build import load_library
from specdec.engine.native.packing import FORMATS, WeightFormat, WeightPacking, declare_functions

KERNEL_VERSION = 1  # part of the numerics id: raise it whenever a kernel's bits change
_INT64, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_Strides = _INT64 * 2


class BatchView(ctypes.Structure):
    """``BatchView`` of attention.h. The batch's tensors must outlive it."""

    _fields_ = [
        ("num_rows", _INT64),
        ("num_logits", _INT64),
        ("max_blocks", _INT64),
        ("block_size", _INT64),
        ("input_ids", _POINTER),
        ("position_ids", _POINTER),
        ("slot_mapping", _POINTER),
        ("row_seq", _POINTER),
        ("context_lens", _POINTER),
        ("path_offsets", _POINTER),
        ("path_slots", _POINTER),
        ("block_tables", _POINTER),
        ("logits_indices", _POINTER),
        ("tap_layers", _POINTER),
        ("num_taps", _INT64),
        ("tapped", _POINTER),
    ]

    @classmethod
    def of(cls, batch: Batch, block_size: int) -> "BatchView":
        """View a batch with contiguous tensors, such as those of ``build_batch``."""
        return cls(
            batch.input_ids.shape[0],
            batch.logits_indices.shape[0],
            batch.block_tables.shape[1],
            block_size,
            batch.input_ids.data_ptr(),
            batch.position_ids.data_ptr(),
            batch.slot_mapping.data_ptr(),
            batch.row_seq.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.path_offsets.data_ptr(),
            batch.path_slots.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.logits_indices.data_ptr(),
        )


class AttentionView(ctypes.Structure):
    """``AttentionView`` of attention.h."""

    _fields_ = [
        ("keys", _POINTER),
        ("values", _POINTER),
        ("sinks", _POINTER),
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("key_dim", _INT64),
        ("value_dim", _INT64),
        ("sliding_window", _INT64),
        ("scaling", _FLOAT),
        ("softcap", _FLOAT),
    ]


class NativeKernels:
    """The compiled library and its thread pool. Calls release the GIL.

    Raises what ``load_library`` raises.
    """

    def __init__(self, num_threads: int, formats: Sequence[WeightFormat] = FORMATS) -> None:
        """``formats``: see ``WeightPacking``."""
        self.num_threads = num_threads
        self.library, variant = load_library()
        declare_functions(self.library, _FUNCTIONS)
        self.variant = variant.name  # decides the bits, with KERNEL_VERSION
        self.pool: int = self.library.specdec_pool_create(num_threads)
        self.packing = WeightPacking(self.library, formats)
        self.lanes: int = self.library.specdec_lanes()
        self.max_head_dim: int = self.library.specdec_max_head_dim()
        self._finalizer = weakref.finalize(self, self.library.specdec_pool_destroy, self.pool)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> "NativeWeight":
        """Pack a weight ``[N, K]``; see ``specdec.engine.model.linear.WeightPacker``."""
        return NativeWeight(self, weight, bias)

    def linear(self, weight: "NativeWeight", rows: torch.Tensor, out: torch.Tensor) -> None:
        """``out = rows @ weight.T + bias``; rows ``[T, K]`` and out ``[T, N]`` contiguous."""
        self.library.specdec_linear(
            self.pool,
            ctypes.byref(weight.view),
            None if weight.bias is None else weight.bias.data_ptr(),
            rows.data_ptr(),
            rows.shape[0],
            weight.in_features,
            weight.out_features,
            out.data_ptr(),
        )


class NativeWeight:
    """A weight packed into panels, in the smallest format that holds it exactly, with its bias."""

    def __init__(self, kernels: NativeKernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._kernels = kernels
        self.out_features, self.in_features = weight.shape
        packing = kernels.packing
        self.panels = packing.empty(packing.num_bytes([weight]))
        self.view = packing.pack([weight], self.panels)
        self.bias = None if bias is None else bias.detach().float().clone().contiguous()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``specdec.engine.model.linear.PackedWeight``."""
        out = rows.new_empty(rows.shape[0], self.out_features)
        self._kernels.linear(self, rows, out)
        return out


class NativeAttention:
    """Row-invariant paged attention in C++; see ``specdec.engine.attention.paged.AttentionKernel``.

    Layers with heads larger than ``max_head_dim`` attend in torch.
    """

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._for_large_heads = TiledAttention()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        context: ForwardContext,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See ``AttentionKernel``. Cost: one native call."""
        if not options.values_in_keys and max(query.shape[2], value.shape[2]) > self._kernels.max_head_dim:
            return self._for_large_heads(query, key, value, layer, context, options)
        cache = cache_of(context)
        query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
        view = context.scratch.get("view")
        if view is None:
            view = context.scratch["view"] = BatchView.of(context.batch, cache.block_size)
        num_rows, num_heads, key_dim = query.shape
        value_dim = value.shape[2]
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        rules = AttentionView(
            cache.keys[layer].data_ptr(),
            cache.values[layer].data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            num_heads,
            key.shape[1],
            key_dim,
            value_dim,
            options.sliding_window or 0,
            options.scaling,
            options.softcap or 0.0,
        )
        out = query.new_empty(num_rows, num_heads, value_dim)
        if options.values_in_keys:
            self._kernels.library.specdec_latent_attention(
                self._kernels.pool,
                ctypes.byref(view),
                ctypes.byref(rules),
                query.data_ptr(),
                _Strides(query.stride(0), query.stride(1)),
                key.data_ptr(),
                key.stride(0),
                out.data_ptr(),
            )
            return out
        self._kernels.library.specdec_attention(
            self._kernels.pool,
            ctypes.byref(view),
            ctypes.byref(rules),
            query.data_ptr(),
            _Strides(query.stride(0), query.stride(1)),
            key.data_ptr(),
            _Strides(key.stride(0), key.stride(1)),
            value.data_ptr(),
            _Strides(value.stride(0), value.stride(1)),
            out.data_ptr(),
        )
        return out


_FUNCTIONS: dict[str, tuple[object, Sequence[object]]] = {
    "specdec_lanes": (ctypes.c_int, ()),
    "specdec_max_head_dim": (ctypes.c_int, ()),
    "specdec_pool_create": (_POINTER, (ctypes.c_int,)),
    "specdec_pool_destroy": (None, (_POINTER,)),
    "specdec_linear": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT64, _POINTER)),
    "specdec_decoder_workspace": (_INT64, (_POINTER, _INT64, ctypes.c_int)),
    "specdec_decoder_step": (ctypes.c_int, (_POINTER,) * 5),
    "specdec_decoder_ahead": (ctypes.c_int, (_POINTER,) * 5),
    "specdec_convolve": (None, (*(_POINTER,) * 4, _INT64, _POINTER)),
    "specdec_delta_rows": (None, (*(_POINTER,) * 4, _INT64, _INT64, _POINTER, _POINTER)),
    "specdec_scan": (
        None,
        (*(_POINTER,) * 3, _INT64, _POINTER, _POINTER, _INT64, _POINTER, _INT64, *((_POINTER,) * 3)),
    ),
    "specdec_attention": (None, (_POINTER,) * 10),
    "specdec_latent_attention": (None, (*(_POINTER,) * 6, _INT64, _POINTER)),
}
