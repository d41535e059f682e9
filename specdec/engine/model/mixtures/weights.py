"""A mixture's weights in one form, whatever its class, and their products in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.engine.model.linear import TorchWeight
from specdec.engine.native.experts import NativeExperts
from specdec.engine.native.kernels import NativeKernels

EXPERTS_VERSION = 1
"""Part of a mixture's numerics id: raise it whenever a mixture's bits change and a dense model's do not."""
Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class ExpertWeights:
    """The stacked weights of a mixture: up, activation, down."""

    up: torch.Tensor
    """[E, U, hidden]"""
    down: torch.Tensor
    """[E, hidden, inner]"""
    up_bias: torch.Tensor | None = None
    """[E, U]"""
    down_bias: torch.Tensor | None = None
    """[E, hidden]"""
    is_gated: bool = False
    """``up`` has the gate's rows, then as many others: the activation is silu(gate) * other."""

    def parts(self) -> list[list[torch.Tensor]]:
        """The up weight of each expert; gate and other apart if gated."""
        return [list(up.chunk(2)) if self.is_gated else [up] for up in self.up]


class PackedExperts(Protocol):
    """A mixture in a kernel's own layout."""

    def __call__(
        self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, activate: Activation
    ) -> torch.Tensor:
        """The weighted sum of each row's experts, in ascending order of their numbers.

        Takes float32 rows ``[T, hidden]``, numbers of experts and weights ``[T, k]``, and the activation of up rows
        ``[pairs, U]``; numbers outside the mixture add nothing. Returns ``[T, hidden]``.
        """


class ExpertsPacker(Protocol):
    """Packs a mixture for a kernel."""

    def __call__(self, weights: ExpertWeights) -> PackedExperts:
        """Return the packed mixture, without references to the originals."""


def native_experts(kernels: NativeKernels, weights: ExpertWeights) -> NativeExperts:
    """See ``ExpertsPacker``."""
    return NativeExperts(kernels, weights.parts(), list(weights.down), weights.up_bias, weights.down_bias)


class TorchExperts:
    """A mixture that torch multiplies, expert by expert in blocks of rows; see ``TorchWeight``."""

    def __init__(self, weights: ExpertWeights, num_threads: int) -> None:
        self._ups = _packed(weights.up, weights.up_bias, num_threads)
        self._downs = _packed(weights.down, weights.down_bias, num_threads)

    def __call__(
        self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, activate: Activation
    ) -> torch.Tensor:
        """See ``PackedExperts``."""
        order = experts.flatten().argsort(stable=True)
        counts = [int((experts == number).sum()) for number in range(len(self._ups))]
        first = int((experts < 0).sum())
        known = order[first : first + sum(counts)]
        sources = rows[known // experts.shape[1]]
        up = torch.cat([pack(part) for pack, part in zip(self._ups, sources.split(counts), strict=True)])
        inner = activate(up)
        products = torch.cat([pack(part) for pack, part in zip(self._downs, inner.split(counts), strict=True)])
        terms = products.new_zeros(experts.numel(), products.shape[1])
        terms[known] = products * weights.flatten()[known, None]
        terms = terms.view(*experts.shape, products.shape[1])
        by_number = experts.argsort(dim=1, stable=True)
        out = torch.zeros_like(terms[:, 0])
        for choice in by_number.unbind(1):
            out = out + terms[torch.arange(len(terms)), choice]
        return out


def _packed(stacked: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> Sequence[TorchWeight]:
    biases = [None] * len(stacked) if bias is None else list(bias)
    return [
        TorchWeight(weight.contiguous(), None if shift is None else shift.contiguous(), num_threads)
        for weight, shift in zip(stacked, biases, strict=True)
    ]
