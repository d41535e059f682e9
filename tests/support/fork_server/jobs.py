"""Jobs of templates, and how a forked process becomes a job's process."""

from __future__ import annotations

import ctypes
import fcntl
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.service.process import die_with_parent

_ADOPTION_S = 10.0
_PARKED_FDS = 500  # files are parked above this number before they get theirs
STARTER = "specdec.service.process"


@dataclass(frozen=True, slots=True)
class Job:
    """One requested process."""

    argv: tuple[str, ...]
    """Arguments after the interpreter: -m MODULE ARGUMENTS."""
    environment: Mapping[str, str]
    cwd: str
    fds: tuple[int, ...]
    """Numbers for the files that are sent with the job."""
    parent: int
    """Process id of the parent."""
    new_session: bool


def become(job: Job, files: Sequence[int], keep: Sequence[int] = ()) -> None:
    """Turn this process, which was forked twice, into the job's. `keep`: files that stay open beside the job's."""
    deadline_s = time.monotonic() + _ADOPTION_S
    while os.getppid() != job.parent:
        if time.monotonic() > deadline_s:
            os._exit(1)
        time.sleep(0.0005)
    if job.new_session:
        os.setsid()
    parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PARKED_FDS) for fd in files]
    for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if fd < _PARKED_FDS and fd not in keep:
            try:
                os.close(fd)
            except OSError:  # the file of the listing itself
                continue
    for fd, number in zip(parked, job.fds, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.cwd)
    paths = [job.cwd, *job.environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = list(dict.fromkeys([*(path for path in paths if path), *sys.path]))


def run(argv: Sequence[str]) -> None:
    """Run `python -m` with these arguments; does the work of the services' starter in its place."""
    _, module, *arguments = argv
    if module == STARTER:
        parent, cores, module, *arguments = arguments
        import signal

        die_with_parent(int(parent), signal.SIGTERM)
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        show_arguments([sys.executable, "-m", module, *arguments])
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, "-m", module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def show_arguments(words: Sequence[str]) -> None:
    """Make /proc show these words as this process's command line, cut to the length of the original one."""
    start, end = (int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = "\0".join(words).encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))
