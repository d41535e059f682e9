"""The products of latent attention (MLA) on the native kernels; ``NativeAttention`` attends."""

import ctypes

import torch

from specdec.engine.native.kernels import NativeKernels
from specdec.engine.native.packing import PackedArena, WeightView, declare_functions

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_Strides = _INT64 * 2


class NativeHeads:
    """See ``specdec.engine.attention.latent.HeadProduct``."""

    def __init__(self, kernels: NativeKernels, weights: torch.Tensor) -> None:
        """Pack weights ``[H, N, K]``."""
        arguments = (_POINTER, _POINTER, _INT64, _POINTER, _POINTER, _INT64, _INT64, _INT64, _POINTER, _POINTER)
        declare_functions(kernels.library, {"specdec_linear_heads": (None, arguments)})
        self._kernels = kernels
        self._num_heads, self._num_outputs, self._depth = weights.shape
        self._arena = PackedArena(kernels.packing, sum(kernels.packing.num_bytes([weight]) for weight in weights))
        self._views = (WeightView * len(weights))(*(self._arena.pack([weight]) for weight in weights))

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``HeadProduct``."""
        if x.stride(2) != 1:
            x = x.contiguous()
        self._kernels.library.specdec_linear_heads(
            self._kernels.pool,
            ctypes.addressof(self._views),
            self._num_heads,
            x.data_ptr(),
            _Strides(x.stride(0), x.stride(1)),
            x.shape[0],
            self._depth,
            self._num_outputs,
            out.data_ptr(),
            _Strides(out.stride(0), out.stride(1)),
        )
