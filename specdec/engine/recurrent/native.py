"""Recurrences in C++."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from specdec.engine.native.kernels import NativeKernels
from specdec.engine.recurrent.convolution import convolve
from specdec.engine.recurrent.scans import Recurrences, ScanSizes
from specdec.engine.states.memory import StateMemory
from specdec.engine.states.plan import StatePlan

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_Method = TypeVar("_Method", bound=Callable[..., Any])
_ACTIVATIONS = (None, "silu", "swish")


class _ScanView(ctypes.Structure):
    """``Scan`` of scan.cpp."""

    _fields_ = [
        *((name, _INT64) for name in ("num_heads", "num_key_heads", "key_dim", "value_dim")),
        *((name, _INT64) for name in ("decays_per_key", "is_delta", "width")),
        *((name, _POINTER) for name in ("rates", "states", "kept")),
    ]

    @classmethod
    def of(cls, sizes: ScanSizes) -> _ScanView:
        """A scan without states."""
        return cls(
            sizes.num_heads,
            sizes.num_key_heads,
            sizes.key_dim,
            sizes.value_dim,
            sizes.decays_per_key,
            sizes.is_delta,
            sum(sizes.widths),
        )


class _ConvolutionView(ctypes.Structure):
    """``Convolution`` of convolution.cpp."""

    _fields_ = [
        *((name, _INT64) for name in ("channels", "before", "is_silu")),
        *((name, _POINTER) for name in ("taps", "bias", "states", "kept")),
    ]


class _WindowsView(ctypes.Structure):
    """``Windows`` of convolution.cpp."""

    _fields_ = [
        *((name, _INT64) for name in ("num_spans", "num_repeated", "num_rows", "num_saved", "num_kept")),
        *((name, _POINTER) for name in ("read", "repeated", "window", "saved", "written", "kept_rows", "kept_places")),
    ]


def _outside_modes(method: _Method) -> _Method:
    """Run a method without modes of torch, which cost a microsecond per call and change nothing here."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return cast("_Method", run)


class NativeRecurrences(Recurrences):
    """Each recurrence is one native call, and a delta rule's rows are another."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._taps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of a weight, which is kept for it

    def convolve(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        plan: StatePlan,
        memory: StateMemory | None,
        cell: int,
    ) -> torch.Tensor:
        """See `Recurrences`."""
        if activation not in _ACTIVATIONS or inputs.dtype != torch.float32:
            return convolve(inputs, weight, bias, activation, plan, memory, cell)
        return self._convolved(inputs, weight, bias, activation is not None, plan, memory, cell)

    @_outside_modes
    def _convolved(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_silu: bool,
        plan: StatePlan,
        memory: StateMemory | None,
        cell: int,
    ) -> torch.Tensor:
        rows = inputs if inputs.stride(1) == 1 else inputs.contiguous()
        (num_rows, channels), before = rows.shape, weight.shape[1] - 1
        taps = self._taps_of(weight)
        window, saved = plan.window(before)
        kept, places = plan.kept_rows
        read, written = plan.read, plan.written
        view = _ConvolutionView(
            channels,
            before,
            is_silu,
            taps.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if memory is None else memory.states[cell].data_ptr(),
            None if memory is None else memory.kept[cell].data_ptr(),
        )
        windows = _WindowsView(
            len(plan.spans),
            len(plan.repeated),
            num_rows,
            0 if memory is None else len(saved),
            0 if memory is None else len(kept),
            read.data_ptr(),
            plan.repeated.data_ptr(),
            window.data_ptr(),
            saved.data_ptr(),
            written.data_ptr(),
            kept.data_ptr(),
            places.data_ptr(),
        )
        out = rows.new_empty(num_rows, channels)
        self._kernels.library.specdec_convolve(
            self._kernels.pool,
            ctypes.byref(view),
            ctypes.byref(windows),
            rows.data_ptr(),
            rows.stride(0),
            out.data_ptr(),
        )
        return out

    @_outside_modes
    def delta_rows(
        self, sizes: ScanSizes, parts: Sequence[torch.Tensor], *, normalizes: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrences`."""
        flat = [part.float().flatten(1) for part in parts]
        flat = [part if part.stride(1) == 1 else part.contiguous() for part in flat]
        query = flat[0].new_empty(flat[0].shape)
        view = _ScanView.of(sizes)
        rows = query.new_empty(len(query), view.width)
        self._kernels.library.specdec_delta_rows(
            self._kernels.pool,
            ctypes.byref(view),
            (_POINTER * len(flat))(*(part.data_ptr() for part in flat)),
            (_INT64 * len(flat))(*(part.stride(0) for part in flat)),
            normalizes,
            len(query),
            query.data_ptr(),
            rows.data_ptr(),
        )
        return query, rows

    @_outside_modes
    def scan(
        self,
        sizes: ScanSizes,
        query: torch.Tensor,
        rows: torch.Tensor,
        rates: torch.Tensor | None,
        plan: StatePlan,
        memory: StateMemory | None,
        cell: int,
    ) -> torch.Tensor:
        """See `Recurrences`."""
        out = rows.new_empty(len(rows), sizes.num_heads, sizes.value_dim)
        own_rates = None if rates is None else rates.contiguous()
        view = _ScanView.of(sizes)
        view.rates = None if own_rates is None else own_rates.data_ptr()
        kept, places = plan.kept_rows
        if memory is not None:
            view.states, view.kept = memory.states[cell].data_ptr(), memory.kept[cell].data_ptr()
        spans, nodes, max_depth = plan.numbers
        self._kernels.library.specdec_scan(
            self._kernels.pool,
            ctypes.byref(view),
            spans.data_ptr(),
            len(spans),
            plan.repeated.data_ptr(),
            nodes.data_ptr(),
            max_depth,
            (_POINTER * 2)(kept.data_ptr(), places.data_ptr()),
            0 if memory is None else len(kept),
            query.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
        )
        return out

    def _taps_of(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight ``[channels, width]`` by places of the window. Cost: once per layer."""
        key = weight.data_ptr()
        if key not in self._taps:
            self._taps[key] = weight, weight.float().t().contiguous()
        return self._taps[key][1]
