"""Runs a module as a child that dies with its parent: ``python -m specdec.cli.child PARENT CORES MODULE``.

A process of its own sets this up for itself, because running Python between fork and exec is unsafe in a
parent with threads. It imports nothing heavy, so it costs some tens of milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGTERM) -> None:
    """Have the kernel send a signal when the parent's thread that started this process ends.

    Leaves at once when the parent is already gone. Linux only; raises OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(0)


def main(argv: list[str]) -> None:
    """Become `python -m MODULE ARGS...`, on the given cores (comma-separated; empty: all)."""
    parent_pid, cores, module, *args = argv
    die_with_parent(int(parent_pid))
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execv(sys.executable, [sys.executable, "-m", module, *args])


if __name__ == "__main__":
    main(sys.argv[1:])
