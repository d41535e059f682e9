"""A child process dies with its parent, and leaves signals to it. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal when the parent's thread that started this process ends.

    A running loop notices the end of its socket; the default signal also ends a stuck one. Raises OSError if the kernel
    refuses, and SystemExit if the parent is already gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit(0)


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM: a signal to the process group must not end the engine before it is drained.

    Handlers, unlike ignored signals, are not inherited by programs that the engine starts.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
