"""Weights in the kernels' own layout: its formats, which one a weight gets, and packing.

All formats hold float32 numbers exactly, and products use them in float32 and in one order: a format decides how much
memory a step reads, never its bits. So the numerics id does not name it.
"""

import ctypes
from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_ALIGNMENT = 64  # a cache line
INT4_GROUP = 32
"""Inputs that share a scale, ``kGroup`` of packed.h."""


class WeightFormat(IntEnum):
    """``Format`` of packed.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


FORMATS = (WeightFormat.BFLOAT16, WeightFormat.FLOAT32)
"""What weights may be packed as, the smallest first."""
FORMATS_OF_QUANTIZED = (WeightFormat.INT4, WeightFormat.INT8, *FORMATS)
"""The same where weights were rounded to such formats. Else these are not tried: zeros, of which made-up models have
many, would fit into int4 and cost less than the weights that they stand for."""


class WeightView(ctypes.Structure):
    """``PackedWeight`` of packed.h. Borrows the memory."""

    _fields_ = [("panels", _POINTER), ("format", _INT64)]


class WeightPacking:
    """Packs weights by the functions of packing.cpp. Weights, and what is made of them, lie on the CPU.

    Several weights that are packed as one have one shape ``[N, K]`` and one format; their panels alternate.
    """

    def __init__(self, library: ctypes.CDLL, formats: Sequence[WeightFormat] = FORMATS) -> None:
        """``formats`` are those to choose from, the smallest first; the last is ``FLOAT32``, which holds everything."""
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
        """Outputs that lie together."""

    def format_of(self, weights: Sequence[torch.Tensor]) -> WeightFormat:
        """The smallest format that holds all numbers exactly. Cost: reads them up to once for each."""
        return next(each for each in self._formats if all(self.fits(weight, each) for weight in weights))

    def fits(self, weight: torch.Tensor, weight_format: WeightFormat) -> bool:
        """Whether a format holds all numbers of ``[N, K]`` exactly."""
        source = weight.detach().float().contiguous()
        return bool(self._library.specdec_fits(source.data_ptr(), *source.shape, weight_format))

    def num_bytes(self, weights: Sequence[torch.Tensor]) -> int:
        """Memory that weights take in their format, in whole cache lines."""
        num_outputs, depth = weights[0].shape
        num_bytes = len(weights) * self._library.specdec_packed_bytes(num_outputs, depth, self.format_of(weights))
        return int(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT)

    def pack(self, weights: Sequence[torch.Tensor], memory: torch.Tensor) -> WeightView:
        """Pack weights in their format into memory, ``num_bytes`` from its start on."""
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
        """Uninitialised memory, on large pages where the system has them."""
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._library.specdec_advise_large_pages(memory.data_ptr(), num_bytes)
        return memory


class PackedArena:
    """Packed weights one after the other in memory that is allocated at once: small ones share large pages."""

    def __init__(self, packing: WeightPacking, num_bytes: int) -> None:
        self._packing = packing
        self._memory = packing.empty(num_bytes)
        self._used_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self._memory.numel()

    def pack(self, weights: Sequence[torch.Tensor]) -> WeightView:
        """See ``WeightPacking.pack``. Raises ``ValueError`` where the arena has no room for them."""
        start = self._used_bytes
        end = start + self._packing.num_bytes(weights)
        if end > self.num_bytes:
            raise ValueError(f"an arena of {self.num_bytes} bytes has no room for {end - start} from {start} on")
        self._used_bytes = end
        return self._packing.pack(weights, self._memory[start:end])


def declare_functions(library: ctypes.CDLL, signatures: Mapping[str, tuple[object, Sequence[object]]]) -> None:
    """Tell ctypes the results and arguments of a library's functions."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
