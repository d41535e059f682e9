"""Control groups of both versions: a memory limit and a part of the processors for each service. Root only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_GONE_S = 10.0
"""Seconds within which the processes of a group that is removed end."""
_MEMORY, _CPU = "memory", "cpu"


class NoCgroups(Exception):
    """No control group can be made on this machine."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Names and contents of a version's files."""

    limit: str
    peak: str
    events: str
    quota: tuple[str, str]
    """Its text is completed by the microseconds of a period."""
    starved: tuple[str, str]
    relieved: tuple[tuple[str, str], ...]


_V1 = _Files(
    limit="memory.limit_in_bytes",
    peak="memory.max_usage_in_bytes",
    events="memory.oom_control",
    quota=("cpu.cfs_quota_us", "{}"),
    starved=("cpu.shares", "2"),
    relieved=(("cpu.cfs_quota_us", "-1"), ("cpu.shares", "1024")),
)
_V2 = _Files(
    limit="memory.max",
    peak="memory.peak",
    events="memory.events",
    quota=("cpu.max", f"{{}} {_PERIOD_US}"),
    starved=("cpu.weight", "1"),
    relieved=(("cpu.max", f"max {_PERIOD_US}"), ("cpu.weight", "100")),
)


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group of one service."""

    memory: Path
    cpu: Path
    files: _Files

    def add(self, pid: int) -> None:
        """Take a process; the children that it starts from now on follow it."""
        for folder in {self.memory, self.cpu}:
            (folder / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def slow(self, share: float) -> None:
        """Leave it a share of a core, whatever else runs."""
        name, text = self.files.quota
        self._write(name, text.format(round(share * _PERIOD_US)))

    def starve(self) -> None:
        """Give it the least share of the processors: nearly nothing while others want them."""
        self._write(*self.files.starved)

    def relieve(self) -> None:
        """Take back `slow` and `starve`."""
        for name, text in self.files.relieved:
            self._write(name, text)

    @property
    def peak_bytes(self) -> int:
        """Memory at its highest, files in its page cache included."""
        return int((self.memory / self.files.peak).read_text(encoding="ascii"))

    @property
    def num_killed(self) -> int:
        """Processes that the kernel killed for want of memory."""
        lines = (self.memory / self.files.events).read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def remove(self) -> None:
        """Remove it; its processes must be about to end."""
        ends_s = time.monotonic() + _GONE_S
        for folder in {self.memory, self.cpu}:
            while folder.exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > ends_s:
                    return
                time.sleep(0.05)

    def _write(self, name: str, text: str) -> None:
        (self.cpu / name).write_text(text, encoding="ascii")


class Cgroups:
    """Makes groups below one of their own. Use as a context manager, which removes them.

    Raises NoCgroups at its beginning where the machine gives none.
    """

    def __init__(self, name: str, root: Path = ROOT, proc: Path = Path("/proc/self")) -> None:
        self._name, self._root, self._proc = name, root, proc
        self._made: list[Cgroup] = []
        self._parents: dict[str, Path] = {}
        self._files = _V1

    def __enter__(self) -> Cgroups:
        try:
            self._parents = dict(self._make_parents())
        except OSError as error:
            raise NoCgroups(str(error)) from None
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._made:
            group.remove()
        for folder in set(self._parents.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def make(self, name: str, memory_bytes: int) -> Cgroup:
        """A group for a service with this memory limit."""
        folders = {controller: folder / name for controller, folder in self._parents.items()}
        for folder in set(folders.values()):
            folder.mkdir()
        group = Cgroup(folders[_MEMORY], folders[_CPU], self._files)
        (group.memory / self._files.limit).write_text(str(memory_bytes), encoding="ascii")
        self._made.append(group)
        return group

    def _make_parents(self) -> Iterator[tuple[str, Path]]:
        paths = _paths(self._proc)
        if _MEMORY in paths and _CPU in paths:
            for controller in (_MEMORY, _CPU):
                folder = self._root / controller / paths[controller].lstrip("/") / self._name
                folder.mkdir()
                yield controller, folder
            return
        # Only the root may have both processes and groups with limits.
        folder, self._files = self._root / self._name, _V2
        (self._root / "cgroup.subtree_control").write_text("+memory +cpu", encoding="ascii")
        folder.mkdir()
        (folder / "cgroup.subtree_control").write_text("+memory +cpu", encoding="ascii")
        yield from ((controller, folder) for controller in (_MEMORY, _CPU))


def _paths(proc: Path) -> Mapping[str, str]:
    """This process's group by controller of version 1."""
    found = {}
    for line in (proc / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def unique_name() -> str:
    """A name that no other run has."""
    return f"specdec-{os.getpid()}"
