"""Runs a module, or a program, as a child that dies with its parent: ``python -m specdec.commands.up.child PARENT CORES
MODULE``.

The child prepares itself, because running Python between fork and exec is unsafe in a parent with threads. It imports
little, so it costs some tens of milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys

from specdec.service.parent_process import die_with_parent


def main(argv: list[str]) -> None:
    """Become `python -m MODULE ARGS...`, or the program MODULE if that is a path, on the given cores.

    Cores are separated by commas; empty: all.
    """
    parent_pid, cores, module, *args = argv
    die_with_parent(int(parent_pid), signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if "/" in module:
        os.execv(module, [module, *args])
    os.execv(sys.executable, [sys.executable, "-m", module, *args])


if __name__ == "__main__":
    main(sys.argv[1:])
