"""Counts the kernels that a pass launches, Triton's and torch's, and their bytes."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from specdec.engine.cuda.launch import Launch, LaunchObserver

_ACCESSED_IN_PART = frozenset({"keys", "values", "cosines", "sines", "part_peak", "part_total", "part_out"})
"""Arguments of kernels."""
_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "detach", "_to_copy_view", "lift_fresh"})


class LaunchCounter(LaunchObserver):
    """Counts the kernels that a pass launches. On the meta device nothing runs, and operations that depend on data
    raise.

    Views and allocations launch nothing. An operation's bytes are those of its input and output tensors, each once;
    reads of the KV cache depend on positions and are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.operations: list[tuple[str, int]] = []
        """Name and bytes of every kernel, Triton's and torch's, in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one of torch's operations."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name == "index_select":  # of whose source it reads as much as it writes
            self.operations.append((name, 2 * _num_bytes([result])))
        elif name not in _NO_KERNEL and not func.is_view:
            self.operations.append((name, _num_bytes([*args, *(kwargs or {}).values(), result])))
        return result

    def saw(self, launch: Launch) -> None:
        """Count one launch; tensors of which it accesses only a part are not counted."""
        self.launches.append(launch)
        names = inspect.signature(launch.kernel.fn).parameters
        whole = [each for name, each in zip(names, launch.arguments, strict=False) if name not in _ACCESSED_IN_PART]
        self.operations.append((launch.name, _num_bytes(whole)))


def _num_bytes(values: list[Any]) -> int:
    seen: dict[tuple[int, int, int], int] = {}
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            key = (value.untyped_storage()._cdata, int(value.storage_offset()), value.numel())
            seen[key] = value.numel() * value.element_size()
        elif isinstance(value, list | tuple):
            stack += value
    return sum(seen.values())
