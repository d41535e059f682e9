"""The memory that a process may use: its cgroup's limit, or the machine's memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_SHARE = 0.6
"""Fraction of the memory that is free at the start for what clients cause; the rest is for fragments, caches, code that
is loaded later, and what the kernel counts of buffers."""
_SHORT_SHARE = 0.8
"""Fraction of the limit above which memory is short."""
_UNLIMITED = 1 << 60
"""Bytes from which a limit of cgroup v1 means none."""


def budget_bytes(num_processes: int = 1, root: Path = _CGROUPS, proc: Path = Path("/proc/self")) -> int:
    """Bytes that requests may cost each of `num_processes` processes that share the limit and start like this one."""
    return max(0, int((limit_bytes(root, proc) // num_processes - own_bytes(proc)) * _SHARE))


def is_short(num_processes: int = 1, root: Path = _CGROUPS, proc: Path = Path("/proc/self")) -> bool:
    """Whether this process has nearly all memory that it may use."""
    return own_bytes(proc) > limit_bytes(root, proc) // num_processes * _SHORT_SHARE


def own_bytes(proc: Path = Path("/proc/self")) -> int:
    """Bytes of memory that a process has."""
    return int((proc / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2: the fifth of its fields has the bytes of mapped blocks, the eighth those of others."""

    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]


_MALLINFO = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _MALLINFO is not None:
    _MALLINFO.restype = _MallocInfo


def allocated_bytes() -> int:
    """Bytes that this process's native code has allocated; 0 where glibc does not tell. Takes some microseconds."""
    if _MALLINFO is None:
        return 0
    info = _MALLINFO()
    return int(info.field_4 + info.field_7)


def limit_bytes(root: Path = _CGROUPS, proc: Path = Path("/proc/self")) -> int:
    """The lowest memory limit of the process's cgroups, v1 and v2, up to their root; at most the machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(root, proc)])


def _limits(root: Path, proc: Path) -> Iterator[int]:
    try:
        lines = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, which is not mounted: then the root is the container's own cgroup.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            try:
                text = folder.joinpath(*parts[:depth], name).read_text(encoding="ascii").strip()
            except OSError:
                continue
            if text.isdecimal() and int(text) < _UNLIMITED:
                yield int(text)
