"""Mixtures of experts on the native kernels."""

import ctypes
from collections.abc import Callable, Sequence

import torch

from specdec.engine.native.kernels import NativeKernels
from specdec.engine.native.packing import PackedArena, WeightView, declare_functions

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_CHUNK_FLOATS = 1 << 24  # floats of memory for the rows that are computed at once


class _ExpertsView(ctypes.Structure):
    """``ExpertsView`` of experts.cpp. The tensors must outlive it."""

    _fields_ = [
        *((name, _POINTER) for name in ("up", "down", "up_bias", "down_bias")),
        *((name, _INT64) for name in ("num_experts", "hidden", "up_width", "inner")),
    ]


class _RoutingView(ctypes.Structure):
    """``RoutingView`` of experts.cpp."""

    _fields_ = [("experts", _POINTER), ("weights", _POINTER), ("num_rows", _INT64), ("per_row", _INT64)]


class NativeExperts:
    """The packed weights of a mixture; see ``specdec.engine.model.mixtures.weights.PackedExperts``."""

    def __init__(
        self,
        kernels: NativeKernels,
        ups: Sequence[Sequence[torch.Tensor]],
        downs: Sequence[torch.Tensor],
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> None:
        """Pack one up and one down weight per expert. An up weight in two parts, gate and up, has a gated SiLU."""
        library = kernels.library
        declare_functions(
            library,
            {
                "specdec_experts": (None, (_POINTER,) * 6),
                "specdec_experts_up": (_INT64, (_POINTER,) * 6),
                "specdec_experts_down": (None, (_POINTER,) * 6),
            },
        )
        self._kernels = kernels  # its pool ends with it
        self.is_gated = len(ups[0]) == 2
        num_bytes = sum(map(kernels.packing.num_bytes, [*ups, *([down] for down in downs)]))
        self._arena = PackedArena(kernels.packing, num_bytes)
        self._ups = (WeightView * len(ups))(*(self._arena.pack(up) for up in ups))
        self._downs = (WeightView * len(downs))(*(self._arena.pack([down]) for down in downs))
        self._biases = [None if bias is None else bias.detach().float().contiguous() for bias in (up_bias, down_bias)]
        self._hidden, self._inner = downs[0].shape
        self._up_width = int(ups[0][0].shape[0])
        self.view = _ExpertsView(
            ctypes.addressof(self._ups),
            ctypes.addressof(self._downs),
            *(None if bias is None else bias.data_ptr() for bias in self._biases),
            len(downs),
            self._hidden,
            self._up_width,
            self._inner,
        )

    def __call__(
        self,
        rows: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """See ``PackedExperts``. Cost: one native call, or two around ``activate``, per chunk of rows."""
        num_rows, per_row = experts.shape
        floats = per_row * (2 * self._hidden + max(self._up_width, self._inner))
        chunk = max(1, _CHUNK_FLOATS // max(1, floats))
        rows = rows.contiguous()
        experts, weights = experts.to(torch.int64).contiguous(), weights.float().contiguous()
        out = rows.new_empty(num_rows, self._hidden)
        for begin in range(0, num_rows, chunk):
            part = slice(begin, begin + chunk)
            self._run(rows[part], experts[part], weights[part], activate, out[part])
        return out

    def _run(
        self,
        rows: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        num_rows, per_row = experts.shape
        num_pairs = num_rows * per_row
        view = ctypes.byref(self.view)
        routing = ctypes.byref(_RoutingView(experts.data_ptr(), weights.data_ptr(), num_rows, per_row))
        if self.is_gated:
            memory = rows.new_empty(num_pairs * (2 * self._hidden + self._inner))
            self._kernels.library.specdec_experts(
                self._kernels.pool, view, routing, rows.data_ptr(), memory.data_ptr(), out.data_ptr()
            )
            return
        memory, up = rows.new_empty(num_pairs, self._hidden), rows.new_empty(num_pairs, self._up_width)
        known = self._kernels.library.specdec_experts_up(
            self._kernels.pool, view, routing, rows.data_ptr(), memory.data_ptr(), up.data_ptr()
        )
        inner = activate(up[:known]).contiguous()
        self._kernels.library.specdec_experts_down(
            self._kernels.pool, view, routing, inner.data_ptr(), memory.data_ptr(), out.data_ptr()
        )
