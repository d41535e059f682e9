"""Metrics of several processes on one page, through prometheus_client's mapped files.

A full disk costs figures, never a process: the blocks of a file are reserved before the file is mapped, because a write
to a mapped page without a block is SIGBUS. Figures without a file stay in their process and are not exported.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import prometheus_client.values
import structlog
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_FIRST_BYTES = 1 << 16
"""Bytes of a new file, as prometheus_client makes it."""
_MEMORY = "/dev/shm"
_PREFIX = "specdec-figures-"
"""Start of folders' names. Former releases' folders, which are not locked, had another."""
_log = structlog.get_logger(__name__)


class ReservedFile(MmapedDict):
    """One process's figures of one kind, by key."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._unfiled: dict[str, tuple[float, float]] = {}
        """Values and times of figures for which the disk has no room."""
        self._is_full = False
        try:
            with open(filename, "a+b") as file:
                os.posix_fallocate(file.fileno(), 0, max(_FIRST_BYTES, os.fstat(file.fileno()).st_size))
            super().__init__(filename, read_mode)
        except OSError as error:
            self._f, self._positions, self._fname = None, {}, filename  # type: ignore[assignment]
            self._stop_growing(error)

    def _init_value(self, key: str) -> None:
        entry_bytes = len(key.encode()) + 32
        if not self._is_full and self._used + entry_bytes > self._capacity:
            try:
                os.posix_fallocate(self._f.fileno(), 0, 2 * self._capacity)
            except OSError as error:
                self._stop_growing(error)
        if self._is_full:
            self._unfiled[key] = (0.0, 0.0)
        else:
            super()._init_value(key)

    def read_value(self, key: str) -> tuple[float, float]:
        """Value and time of a figure, which is made if it is new."""
        self._make(key)
        if key in self._unfiled:
            return self._unfiled[key]
        value, timestamp = super().read_value(key)
        return value, timestamp

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Set a figure, which is made if it is new."""
        self._make(key)
        if key in self._unfiled:
            self._unfiled[key] = (value, timestamp)
        else:
            super().write_value(key, value, timestamp)

    def _make(self, key: str) -> None:
        if key not in self._positions and key not in self._unfiled:
            self._init_value(key)

    def _stop_growing(self, error: OSError) -> None:
        self._is_full = True
        _log.error("metrics_not_exported", file=self._fname, error=error.strerror, note="free the disk and restart")


# Here, because processes that are started with the variable set make their metrics without another call.
prometheus_client.values.MmapedDict = ReservedFile  # type: ignore[attr-defined]


@contextlib.contextmanager
def metrics_folder() -> Iterator[str | None]:
    """A folder for the files, below TMPDIR or, if that is full, in memory; None if neither has room.

    Folders of processes that were killed are removed first.
    """
    parents = [_MEMORY]
    with contextlib.suppress(OSError):  # no folder can be written
        parents.insert(0, tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        for parent in parents:
            try:
                _remove_left(parent)
                folder = stack.enter_context(_owned_folder(parent))
            except OSError as error:
                _log.error("metrics_folder_failed", folder=parent, error=error.strerror)
                continue
            if _has_room(folder):
                yield folder
                return
        yield None


@contextlib.contextmanager
def _owned_folder(parent: str) -> Iterator[str]:
    """A new folder, locked for as long as this process or a child forked from it lives."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        with _locked(folder, fcntl.LOCK_EX):
            if not os.path.isdir(folder):  # a process that saw it without a lock has removed it
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return


def _remove_left(parent: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            folder = os.path.join(parent, name)
            if name.startswith(_PREFIX):
                with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_locked:
                    if is_locked:
                        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: str, operation: int) -> Iterator[bool]:
    """Whether a folder of this user is locked; not where another process holds it, or without locks on its disk."""
    with contextlib.ExitStack() as stack:
        is_locked = False
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, lock)
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, operation)
                is_locked = True
        yield is_locked


def _has_room(folder: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, _FIRST_BYTES)
    except OSError as error:
        _log.error("metrics_folder_failed", folder=folder, error=os.strerror(error.errno or errno.ENOSPC))
        return False
    return True


def enable_multiprocess_metrics(directory: str | None, process: str | None = None) -> None:
    """Send metrics made from now on, here and in processes started from here, to files in `directory`.

    The files are named after `process`, a name that no other running process may have, or after the process's number.
    With a name, a process that is started again continues its counters. Without a directory each process keeps its own.
    """
    if directory is None:
        return
    os.environ[_VARIABLE] = directory
    identify: Callable[[], int | str] = os.getpid if process is None else lambda: process
    prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(identify)


def forget_gauges(directory: str | None, process: str) -> None:
    """Drop the gauges of a process that has ended; its counters stay on the page."""
    if directory is not None:
        mark_process_dead(process, directory)


def forget_gauges_of(pid: int) -> None:
    """Drop the gauges of a process that was started from here and has ended. Without multiprocess files, do nothing."""
    if (directory := os.environ.get(_VARIABLE)) is not None:
        mark_process_dead(pid, directory)


def scrape_registry(own: CollectorRegistry) -> CollectorRegistry:
    """The registry of /metrics: in multiprocess mode the files of all processes, otherwise the process's own."""
    if _VARIABLE not in os.environ:
        return own
    registry = CollectorRegistry()
    _FilesCollector(registry)
    return registry


class _FilesCollector(MultiProcessCollector):
    """Merges the files; a file that a process is just creating is empty, and is left out."""

    def collect(self) -> Iterable[Metric]:
        files = [str(path) for path in Path(self._path).glob("*.db") if _has_content(path)]
        return self.merge(files, accumulate=True)


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # its process has ended since the folder was read
        return False
