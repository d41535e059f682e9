"""Launches of Triton kernels, which others may see: they are counted, priced and compiled without a GPU."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Place = tuple[str, str, int | None]
"""Name of an argument, attribute of a source, and index of the source; None: it is named by the caller."""


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
    def saw(self, launch: Launch) -> None:
        """See one launch."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *sources: object,
    options: Mapping[str, Any],
    **named: Any,
) -> None:
    """Launch a kernel; on meta tensors it is only seen.

    Args:
        kernel: a function of ``triton.jit``; its first argument is a tensor, its last are constants, named in capitals.
        sources: objects whose classes declare the kernel's other arguments, constants in small letters.
        named: arguments and constants by name; names that the kernel does not have are left out.
    """
    places = _places(kernel.fn, tuple(map(type, sources)), tuple(named))
    arguments, constants = (
        {name: named[name] if at is None else getattr(sources[at], own) for name, own, at in of_kind}
        for of_kind in places
    )
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, LaunchObserver):
            mode.saw(Launch(kernel, grid, tuple(arguments.values()), constants, options))
    if next(iter(arguments.values())).device.type != "meta":
        kernel[grid](*arguments.values(), **constants, **options)


@functools.cache
def _places(kernel: Callable[..., None], kinds: tuple[type, ...], named: tuple[str, ...]) -> tuple[list[Place], ...]:
    """Where a kernel's arguments, and its constants, come from. Kept: looking for them takes 10 us per launch."""
    places: tuple[list[Place], ...] = ([], [])
    for name in inspect.signature(kernel).parameters:
        own = name.lower()
        at = None if name in named else [hasattr(kind, own) for kind in kinds].index(True)
        places[name.isupper()].append((name, own, at))
    return places


def power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``. Triton's own takes 4 us."""
    return 1 << (number - 1).bit_length()
