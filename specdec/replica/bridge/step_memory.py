"""The sessions an engine works on, in memory that outlives it: after a crash or stall its servicer reads them there.

Noting a step of 64 sessions costs 3 us: one copy into memory, and no system call.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from specdec.wire.error_details import KEY_BYTES

MAX_KEYS = 448
"""Sessions noted for one step; a longer list is not reported, as a stream's status has room for 4 KB in gRPC. Engines
step 64 sessions at once by default."""
_HEADER_BYTES = 8
NUM_BYTES = _HEADER_BYTES + KEY_BYTES * MAX_KEYS
_NOTHING, _UNTOLD = 0, 1
"""Values of the first word: at rest; at work for no particular session. Larger values are 1 + the number of
sessions."""


class StepMemory:
    """Shared memory: the engine's loop writes, its servicer reads, also after the engine's end.

    The count is written last: a writer that dies half-way leaves "at work" and no wrong session.
    """

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: a shared file of NUM_BYTES; None: memory that no other process sees."""
        self._memory = mmap.mmap(-1 if fd is None else fd, NUM_BYTES)
        self._head = memoryview(self._memory)[:_HEADER_BYTES].cast("Q")

    def work_on(self, keys: Sequence[bytes]) -> None:
        """Note that the next work is for the sessions with these keys."""
        self._head[0] = _UNTOLD
        num_keys = len(keys)
        if 0 < num_keys <= MAX_KEYS:
            self._memory[_HEADER_BYTES : _HEADER_BYTES + KEY_BYTES * num_keys] = b"".join(keys)
            self._head[0] = _UNTOLD + num_keys

    def work(self) -> None:
        """Note that the next work is for no particular session."""
        self._head[0] = _UNTOLD

    def rest(self) -> None:
        """Note that no work is being done."""
        self._head[0] = _NOTHING

    def read_keys(self) -> bytes | None:
        """Keys of the current, or the dead writer's last, sessions, as in `EngineEnd.session_keys`; None: unknown."""
        work = self._head[0]
        num_keys = 0 if work == _NOTHING else work - _UNTOLD
        if work == _UNTOLD or num_keys > MAX_KEYS:
            return None
        return self._memory[_HEADER_BYTES : _HEADER_BYTES + KEY_BYTES * num_keys]


def new_step_file() -> int:
    """A file descriptor of anonymous memory for a StepMemory, which the caller passes on and closes."""
    fd = os.memfd_create("specdec-step")
    os.ftruncate(fd, NUM_BYTES)
    return fd
