"""Launches of Triton kernels, which others may see: they are counted, priced and compiled without a GPU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    """Options of the compiler, such as ``num_warps``."""

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)


class LaunchObserver(TorchDispatchMode):
    """A mode of torch that sees launches as well."""

    @abstractmethod
    def saw(self, launch: Launch, cached: tuple[torch.Tensor, ...]) -> None:
        """See one launch; the kernel accesses only a part of ``cached`` tensors."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    options: Mapping[str, Any],
    cached: tuple[torch.Tensor, ...] = (),
    **constants: Any,
) -> None:
    """Launch a kernel; on meta tensors it is only seen.

    Args:
        kernel: a function of ``triton.jit``.
        grid: number of programs in each dimension.
        arguments: the kernel's arguments in order, without constants; the first is a tensor.
        options: options of the compiler, such as ``num_warps``.
        cached: tensors of which the kernel accesses only a part.
        constants: the kernel's constants.
    """
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, LaunchObserver):
            mode.saw(Launch(kernel, grid, arguments, constants, options), cached)
    if arguments[0].device.type != "meta":
        kernel[grid](*arguments, **constants, **options)
