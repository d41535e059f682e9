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
    *sources: object,
    options: Mapping[str, Any],
    cached: tuple[torch.Tensor, ...] = (),
    **named: Any,
) -> None:
    """Launch a kernel; on meta tensors it is only seen.

    Args:
        kernel: a function of ``triton.jit``; its first argument is a tensor, its last are constants, named in capitals.
        grid: number of programs in each dimension.
        sources: objects with attributes named as the kernel's other arguments, constants in small letters.
        options: options of the compiler, such as ``num_warps``.
        cached: tensors of which the kernel accesses only a part.
        named: arguments and constants by name; names that the kernel does not have are left out.
    """
    values = {name: named[name] if name in named else _found(name, sources) for name in kernel.arg_names}
    arguments = tuple(value for name, value in values.items() if not name.isupper())
    constants = {name: value for name, value in values.items() if name.isupper()}
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, LaunchObserver):
            mode.saw(Launch(kernel, grid, arguments, constants, options), cached)
    if arguments[0].device.type != "meta":
        kernel[grid](*arguments, **constants, **options)


def _found(name: str, sources: tuple[object, ...]) -> Any:
    attribute = name.lower()
    return next(getattr(source, attribute) for source in sources if hasattr(source, attribute))
