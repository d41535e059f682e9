"""Weights as floating-point numbers of 8 bits, with a scale per output.

Scales are powers of two, so that rounded weights are numbers of 16 bits as well: the dense reference of the self-test
has the same weights as the scaled products of a GPU (``specdec.engine.cuda.products``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0
"""Largest number of the format."""
_LEAST_SCALE = 2.0**-60
_MANTISSA_BITS = 23


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight ``[N, K]`` in 8 bits."""

    numbers: torch.Tensor
    """[N, K] float8_e4m3fn."""
    scales: torch.Tensor
    """[1, N] float32."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> Fp8Weight:
        """The nearest numbers to a weight of finite numbers; exactly those of a weight from `rounded`."""
        peaks = weight.abs().amax(dim=1, keepdim=True).float().clamp_min(_LEAST_SCALE * FP8_MOST)
        # Rounded up to a power of two; a peak of exactly FP8_MOST times one, which rounding makes, keeps that one.
        exponents = ((peaks / FP8_MOST).view(torch.int32) + ((1 << _MANTISSA_BITS) - 1)) >> _MANTISSA_BITS
        scales = (exponents << _MANTISSA_BITS).view(torch.float32)
        return cls((weight.float() / scales).to(FP8), scales.view(1, -1))

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the numbers stand for, ``[N, K]``; exact in bfloat16 and float32."""
        return (self.numbers.float() * self.scales.view(-1, 1)).to(dtype)


def round_to_fp8(weight: torch.Tensor) -> torch.Tensor:
    """Weights ``[N, K]`` rounded to numbers of 4 significant bits, times a power of two per output."""
    return Fp8Weight.of(weight).rounded(weight.dtype)
