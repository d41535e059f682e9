"""Counts the kernels that a pass launches, Triton's and torch's, and their bytes."""

from __future__ import annotations

from typing import Any

import torch

from specdec.engine.cuda.launch import Launch, LaunchObserver

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
        if name not in _NO_KERNEL and not func.is_view:
            self.operations.append((name, _num_bytes([*args, *(kwargs or {}).values(), result])))
        return result

    def saw(self, launch: Launch, cached: tuple[torch.Tensor, ...]) -> None:
        """Count one launch; the bytes of ``cached`` tensors are not counted."""
        self.launches.append(launch)
        skipped = {tensor.untyped_storage()._cdata for tensor in cached}
        tensors = [a for a in launch.arguments if not _is_in(a, skipped)]
        self.operations.append((launch.name, _num_bytes(tensors)))


def _is_in(argument: Any, storages: set[int]) -> bool:
    return isinstance(argument, torch.Tensor) and argument.untyped_storage()._cdata in storages


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
