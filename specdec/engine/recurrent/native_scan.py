"""Scans in C++."""

from __future__ import annotations

import ctypes

import torch

from specdec.engine.native.kernels import NativeKernels
from specdec.engine.recurrent.scans import ScanSizes
from specdec.engine.states.memory import StateMemory
from specdec.engine.states.plan import StatePlan

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _ScanView(ctypes.Structure):
    """``Scan`` of scan.cpp."""

    _fields_ = [
        *((name, _INT64) for name in ("num_heads", "num_key_heads", "key_dim", "value_dim")),
        *((name, _INT64) for name in ("decays_per_key", "is_delta", "width")),
        *((name, _POINTER) for name in ("rates", "states", "kept")),
    ]


class NativeScan:
    """`specdec.engine.recurrent.scans.Scan` in one native call."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def __call__(
        self,
        sizes: ScanSizes,
        query: torch.Tensor,
        rows: torch.Tensor,
        rates: torch.Tensor | None,
        plan: StatePlan,
        memory: StateMemory | None,
        cell: int,
    ) -> torch.Tensor:
        """See `Scan`."""
        out = rows.new_empty(len(rows), sizes.num_heads, sizes.value_dim)
        own_rates = None if rates is None else rates.contiguous()
        view = _ScanView(
            sizes.num_heads,
            sizes.num_key_heads,
            sizes.key_dim,
            sizes.value_dim,
            sizes.decays_per_key,
            sizes.is_delta,
            rows.shape[1],
            None if own_rates is None else own_rates.data_ptr(),
            None if memory is None else memory.states[cell].data_ptr(),
            None if memory is None else memory.kept[cell].data_ptr(),
        )
        spans, nodes, max_depth = plan.numbers
        self._kernels.library.specdec_scan(
            self._kernels.pool,
            ctypes.byref(view),
            spans.data_ptr(),
            len(spans),
            plan.repeated.data_ptr(),
            nodes.data_ptr(),
            max_depth,
            query.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
        )
        if memory is not None:
            kept, places = plan.kept_rows
            memory.kept[cell][places] = rows[kept]
        return out
