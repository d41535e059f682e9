"""Calls the native sampling kernels on tensors; same results as the torch functions that they replace."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from specdec.engine.native.build import NativeUnavailable, load_library

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p


class NativeSampling:
    """`perturbed_top` and `cut_` in C++, on the caller's thread. Calls release the GIL.

    Raises what `load_library` raises.
    """

    def __init__(self) -> None:
        library, _ = load_library()
        try:
            self._perturbed_top = library.specdec_perturbed_top
            self._cut = library.specdec_cut
            self._gumbel = library.specdec_gumbel
        except AttributeError as error:
            raise NativeUnavailable(f"the library has no sampling kernels: {error}") from error
        self._perturbed_top.argtypes = [
            _POINTER,
            _INT64,
            _INT64,
            _INT64,
            _POINTER,
            _POINTER,
            _INT64,
            _POINTER,
            _POINTER,
        ]
        self._perturbed_top.restype = None
        self._cut.argtypes = [_POINTER, _INT64, _INT64, _POINTER, _POINTER, _POINTER]
        self._cut.restype = None
        self._gumbel.argtypes = [ctypes.c_uint32, ctypes.c_uint32, _INT64, _POINTER]
        self._gumbel.restype = None

    def perturbed_top(
        self, logits: Tensor, temperatures: Sequence[float], keys: Sequence[int], num_top: int
    ) -> tuple[list[int], list[float]]:
        """See `specdec.engine.sampling.perturbed_top.perturbed_top`; logits on the CPU."""
        num_rows, vocab_size = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        token_ids = (_INT64 * (num_rows * num_top))()
        scores = (ctypes.c_float * (num_rows * num_top))()
        self._perturbed_top(
            logits.data_ptr(),
            num_rows,
            vocab_size,
            logits.stride(0),
            (ctypes.c_float * num_rows)(*temperatures),
            (ctypes.c_uint32 * (2 * num_rows))(*keys),
            num_top,
            token_ids,
            scores,
        )
        return list(token_ids), list(scores)

    def cut_(self, scores: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_score: Sequence[float]) -> Tensor:
        """See `specdec.engine.sampling.logit_processors.cut_`; scores contiguous, on the CPU."""
        if not scores.is_contiguous():
            raise ValueError("scores must be contiguous, as they are cut in place")
        num_rows, vocab_size = scores.shape
        self._cut(
            scores.data_ptr(),
            num_rows,
            vocab_size,
            (_INT64 * num_rows)(*top_k),
            (ctypes.c_double * num_rows)(*top_p),
            (ctypes.c_double * num_rows)(*min_score),
        )
        return scores

    def gumbel_range(self, first: int, stride: int, out: Tensor) -> Tensor:
        """For tests: fill `out` with the kernel's noise of hashes `first`, `first + stride`, ..."""
        self._gumbel(first, stride, out.numel(), out.data_ptr())
        return out
