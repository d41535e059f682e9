"""Row-invariant linear layers, which replace a model's own.

``nn.Linear`` picks its kernel by the number of rows, so that a row's bits differ alone and in a batch. Here the weight
is packed once, and every output is one sum in a fixed order. Activations need care, too: ATen computes the last few
elements of a tensor by another ``exp``.
"""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.engine.native.variants import cpu_features

_ACTIVATION_MODULES = ("GELU", "SiLU", "Sigmoid", "Mish", "Laplace", "Softplus", "Hardswish", "Swish")
_BLOCK_ROWS = 8  # small, as plain decoding pads one row to it
_VECTOR_MULTIPLE = 64  # ATen's vectorised loops take at most this many elements at a time


class PackedWeight(Protocol):
    """A weight in a kernel's own layout."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous float32 rows ``[T, K]``; returns ``[T, N]``."""


class WeightPacker(Protocol):
    """Packs a weight ``[N, K]`` and a bias ``[N]`` for a kernel."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """Return the packed weight, without references to the originals."""


class PackedLinear(nn.Module):
    """Replaces ``nn.Linear`` or transformers' ``Conv1D``."""

    bias = None
    """The packed weight adds it, also in products of ``weight``."""

    def __init__(self, packed: PackedWeight, in_features: int, out_features: int, has_bias: bool) -> None:
        super().__init__()
        self.packed = packed
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = has_bias
        self.weight = PackedMatrix.of(packed, in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` over the last dimension."""
        with torch._C.DisableTorchFunction():  # modes cost a microsecond per call, and change nothing here
            rows = x.reshape(-1, self.in_features).contiguous()
            return self.packed(rows).view(*x.shape[:-1], self.out_features)


class PackedMatrix(torch.Tensor):
    """Stands for a packed weight ``[N, K]`` in models that read it: it has its dtype and shape, but no memory.

    Its product with columns is right; other values are NaN.
    """

    packed: PackedWeight

    @classmethod
    def of(cls, packed: PackedWeight, in_features: int, out_features: int) -> "PackedMatrix":
        """The stand-in for a packed weight."""
        matrix = torch.full((), torch.nan).expand(out_features, in_features).as_subclass(cls)
        matrix.packed = packed
        return matrix

    def __matmul__(self, columns: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The product with ``[1, K, T]``, plus the layer's bias."""
        return self.packed(columns[0].transpose(0, 1).contiguous()).transpose(0, 1).unsqueeze(0)


class WholeVectorActivation(nn.Module):
    """Pads an element-wise module's input to whole vectors, so that no element is computed by a scalar tail."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The inner module's result."""
        return in_whole_vectors(self.inner, x)


def in_whole_vectors(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An element-wise function of ``x``, padded so that no element is computed by a scalar tail."""
    missing = -x.numel() % _VECTOR_MULTIPLE
    if not missing and x.is_contiguous():
        return function(x)
    padded = nn.functional.pad(x.reshape(-1), (0, missing))
    return function(padded)[: x.numel()].view(x.shape)


class TorchWeight:
    """A weight that torch multiplies in blocks of exactly ``_BLOCK_ROWS`` rows, with padding.

    Libraries choose their loops, and so the order of a sum, by the number of rows: oneDNN has other kernels for a
    single row of a long sum, and more on old CPUs. For one shape the same code runs, so that a row's bits depend on the
    row and at most on its place in the block; the self-test checks that.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> None:
        """Pack ``[N, K]``. Uses ``num_threads`` only if they give the same bits as one thread."""
        own_bias = None if bias is None else bias.detach().clone()
        self._product = _onednn_product(weight, own_bias) or partial(
            nn.functional.linear, weight=weight.detach().clone(), bias=own_bias
        )
        self._out_features = weight.shape[0]
        self._num_threads = num_threads
        trial = torch.linspace(-1.0, 1.0, _BLOCK_ROWS * weight.shape[1]).sin_().view(_BLOCK_ROWS, -1)
        threaded = self(trial)
        self._num_threads = 1
        if torch.equal(threaded, self(trial)):
            self._num_threads = num_threads

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight``. Only this call uses more than one ATen thread."""
        num_rows = rows.shape[0]
        if num_rows == 0:
            return rows.new_empty(0, self._out_features)
        missing = -num_rows % _BLOCK_ROWS
        blocks = (nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows).split(_BLOCK_ROWS)
        threads = torch.get_num_threads()
        if threads != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            parts = [self._product(block) for block in blocks]
        finally:
            if threads != self._num_threads:
                torch.set_num_threads(threads)
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:num_rows]


class TorchHeads:
    """A product with one weight ``[N, K]`` per head; see ``specdec.engine.attention.latent.HeadProduct``."""

    def __init__(self, weights: torch.Tensor, num_threads: int) -> None:
        self._packed = [TorchWeight(weight.contiguous(), None, num_threads) for weight in weights]

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``HeadProduct``."""
        for head, packed in enumerate(self._packed):
            out[:, head] = packed(x[:, head].contiguous())


def torch_path() -> str:
    """Name of ``TorchWeight``'s kernels on this machine: those of oneDNN and BLAS depend on the CPU."""
    library = "onednn" if torch.backends.mkldnn.is_available() else "blas"
    cpu = " ".join([*sorted(cpu_features()), os.environ.get("ONEDNN_MAX_CPU_ISA", "")])
    return f"{library}-{_BLOCK_ROWS}-{hashlib.blake2b(cpu.encode(), digest_size=4).hexdigest()}"


def _onednn_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """oneDNN's product with a weight packed for blocks of rows; None if this torch lacks oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _BLOCK_ROWS)
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def make_modules_row_invariant(model: nn.Module, pack: WeightPacker) -> None:
    """Replace all linear layers and activations of a float32 CPU model, in place.

    Weights are packed one by one and the originals freed, so that memory peaks one weight above the model's size. A
    weight shared with an embedding is copied.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_replaceable(child):
                places.setdefault(id(child), []).append((parent, name))
    for uses in places.values():  # holds parents only: a replaced module's weight is freed at once
        new = _replacement(getattr(*uses[0]), pack)
        for parent, name in uses:
            setattr(parent, name, new)


def _is_replaceable(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Conv1D) or is_activation(module)


def is_activation(module: nn.Module) -> bool:
    """Whether a module is an element-wise function without weights."""
    if not any(word in type(module).__name__ for word in _ACTIVATION_MODULES):
        return False
    return next(module.parameters(), None) is None and next(module.children(), None) is None


def _replacement(module: nn.Module, pack: WeightPacker) -> nn.Module:
    if isinstance(module, nn.Linear):
        packed = pack(module.weight.detach(), module.bias)
        return PackedLinear(packed, module.in_features, module.out_features, module.bias is not None)
    if isinstance(module, Conv1D):
        packed = pack(module.weight.detach().t().contiguous(), module.bias)
        return PackedLinear(packed, module.weight.shape[0], module.weight.shape[1], module.bias is not None)
    return WholeVectorActivation(module)
