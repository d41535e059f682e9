"""Packs weights in the kernels' layout, in the smallest format that holds them.

All formats hold float32 numbers exactly, and products use them in float32 and in one order. So a format decides the
memory that a step reads, never its bits, and is not in the numerics id.
"""

import ctypes
from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_ALIGNMENT = 64  # a cache line
INT4_GROUP = 32
"""Inputs that share a scale (``kGroup`` of packed.h)."""


class WeightFormat(IntEnum):
    """``Format`` of packed.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


FORMATS = (WeightFormat.BFLOAT16, WeightFormat.FLOAT32)
"""Formats of weights, the smallest first."""
FORMATS_OF_QUANTIZED = (WeightFormat.INT4, WeightFormat.INT8, *FORMATS)
"""Formats of quantized weights, the smallest first. Other weights do not try these: the many zeros of dummy models
would fit int4 and make them faster than real ones.
"""


class WeightView(ctypes.Structure):
    """``PackedWeight`` of packed.h. The memory must outlive it."""

    _fields_ = [("panels", _POINTER), ("format", _INT64)]


class WeightPacking:
    """Packs weights by packing.cpp. Weights and packed weights are on the CPU.

    Weights that are packed together have the same shape ``[N, K]`` and format; their panels alternate.
    """

    def __init__(self, library: ctypes.CDLL, formats: Sequence[WeightFormat] = FORMATS) -> None:
        """``formats``: allowed formats, the smallest first; the last is ``FLOAT32``, which holds all numbers."""
        self._library = library
        self._formats = formats
        declare_functions(
            library,
            {
                "specdec_panel_width": (ctypes.c_int, ()),
                "specdec_fits": (ctypes.c_int, (_POINTER, _INT64, _INT64, _INT64)),
                "specdec_packed_bytes": (_INT64, (_INT64, _INT64, _INT64)),
                "specdec_pack": (None, (_POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER)),
                "specdec_advise_large_pages": (None, (_POINTER, _INT64)),
            },
        )
        self.panel_width: int = library.specdec_panel_width()
        """Outputs per panel."""

    def format_of(self, weights: Sequence[torch.Tensor]) -> WeightFormat:
        """The smallest format that holds all numbers exactly. Cost: at most one pass over them per format."""
        return next(each for each in self._formats if all(self.fits(weight, each) for weight in weights))

    def fits(self, weight: torch.Tensor, weight_format: WeightFormat) -> bool:
        """Whether a format holds all numbers of ``[N, K]`` exactly."""
        source = weight.detach().float().contiguous()
        return bool(self._library.specdec_fits(source.data_ptr(), *source.shape, weight_format))

    def num_bytes(self, weights: Sequence[torch.Tensor]) -> int:
        """Bytes of packed weights, in whole cache lines."""
        num_outputs, depth = weights[0].shape
        num_bytes = len(weights) * self._library.specdec_packed_bytes(num_outputs, depth, self.format_of(weights))
        return int(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT)

    def pack(self, weights: Sequence[torch.Tensor], memory: torch.Tensor) -> WeightView:
        """Pack weights into the first ``num_bytes`` of ``memory``."""
        num_outputs, depth = weights[0].shape
        weight_format = self.format_of(weights)
        panel_bytes: int = self._library.specdec_packed_bytes(1, depth, weight_format)
        for index, weight in enumerate(weights):
            source = weight.detach().float().contiguous()
            self._library.specdec_pack(
                source.data_ptr(),
                num_outputs,
                depth,
                weight_format,
                len(weights),
                memory.data_ptr() + index * panel_bytes,
            )
        return WeightView(memory.data_ptr(), weight_format)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised memory, on large pages if the system has them."""
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._library.specdec_advise_large_pages(memory.data_ptr(), num_bytes)
        return memory


class PackedArena:
    """Packed weights in one allocation, so that small ones share large pages."""

    def __init__(self, packing: WeightPacking, num_bytes: int) -> None:
        self._packing = packing
        self._memory = packing.empty(num_bytes)
        self._used_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return self._memory.numel()

    def pack(self, weights: Sequence[torch.Tensor]) -> WeightView:
        """See ``WeightPacking.pack``. Raises ``ValueError`` if the arena is full."""
        start = self._used_bytes
        end = start + self._packing.num_bytes(weights)
        if end > self.num_bytes:
            raise ValueError(f"an arena of {self.num_bytes} bytes has no room for {end - start} from {start} on")
        self._used_bytes = end
        return self._packing.pack(weights, self._memory[start:end])


def declare_functions(library: ctypes.CDLL, signatures: Mapping[str, tuple[object, Sequence[object]]]) -> None:
    """Declare results and arguments of a library's functions to ctypes."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
