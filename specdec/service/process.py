"""Set up a process at its start: its death with its parent, its cores, and gRPC's polling. Linux only.

As a program it runs a module, or another program, that dies with its parent:
``python -m specdec.service.process PARENT CORES MODULE``. A process of its own sets this up for itself, because running
Python between fork and exec is unsafe in a parent with threads. So nothing heavy is imported here, and no gRPC, which
reads its environment when it is imported.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
_REQUIREMENT = re.compile(r"""([\w.-]+).*\bextra == ["']([\w-]+)""")
_GRPC_EXPERIMENTS = "GRPC_EXPERIMENTS"
_WITHOUT_EVENT_ENGINE = "-event_engine_client"


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
    """Ignore SIGINT, SIGTERM and SIGHUP: a signal to the process group must not end it before the service is drained.

    Handlers, unlike ignored signals, are not inherited by programs that this process starts.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a process to end, besides Ctrl-C's; no SIGHUP where it is ignored, as under nohup."""
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if is_kept else [signal.SIGTERM, signal.SIGHUP]


def import_path() -> str:
    """PYTHONPATH with which a child finds this process's modules.

    Without relative entries, as hooks of editable installs are: with one, Python does not start where the working
    folder was deleted.
    """
    return os.pathsep.join(filter(os.path.isabs, sys.path))


def parse_cores(text: str) -> frozenset[int]:
    """Core numbers from a list such as 0-3,6. Raises ValueError that names the fault."""
    cores: set[int] = set()
    for part in text.split(","):
        first, separator, last = part.strip().partition("-")
        if not first.isdigit() or (separator and not last.isdigit()):
            raise ValueError(f"{text!r} is not auto, off or a list of cores such as 1-3,6")
        low, high = int(first), int(last or first)
        if high < low:
            raise ValueError(f"{part.strip()!r} is a falling range: write the lower core first")
        cores.update(range(low, high + 1))
    return frozenset(cores)


def split_cores(setting: str, available: Iterable[int]) -> tuple[frozenset[int] | None, frozenset[int] | None]:
    """The cores of (engine, servicer); None: do not pin.

    If the servicer works on a core that computes, every thread of the step waits for that core at the next barrier. So
    the two share no core if there are several.

    `setting` is auto, off or a list. auto leaves the lowest eighth of the cores, at least one, to the servicer and the
    others to the engine; a single core is shared. Raises ValueError if a listed core is not available.
    """
    cores = sorted(available)
    if setting == "off" or (setting == "auto" and len(cores) < 2):
        return None, None
    if setting == "auto":
        engine = frozenset(cores[max(1, len(cores) // 8) :])
    else:
        engine = parse_cores(setting)
        missing = sorted(engine.difference(cores))
        if missing:
            raise ValueError(f"engine_cores: {missing} are not available: this process has the cores {cores}")
    return engine, (frozenset(cores) - engine) or None


def missing_extra(error: BaseException) -> str | None:
    """Return a message that names the missing extra if an import failed for lack of one; otherwise None."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    from importlib import metadata  # takes as long as all other imports here

    try:
        requirements = metadata.requires("specdec") or []
    except metadata.PackageNotFoundError:
        return None
    wanted = error.name.partition(".")[0].replace("_", "-")
    found = (_REQUIREMENT.match(line) for line in requirements)
    extra = next((one[2] for one in found if one and one[1] == wanted), None)
    return None if extra is None else f"this needs {wanted}: pip install 'specdec[{extra}]'"


def poll_in_one_thread() -> None:
    """Let clients read in one thread; gRPC's event engine passes each message between threads.

    Call it before gRPC is imported; later it has no effect. A value in the environment is kept.
    """
    os.environ.setdefault(_GRPC_EXPERIMENTS, _WITHOUT_EVENT_ENGINE)


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
