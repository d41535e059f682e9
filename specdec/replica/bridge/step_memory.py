"""What an engine works on, in memory that outlives it: its servicer reads there whom a death or a standstill befell.

To note a step of 64 sessions costs 3 us: a copy into memory, and no system call.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from specdec.wire.error_details import KEY_BYTES

MAX_KEYS = 448
"""More are not told one by one: the status of a stream, of which gRPC hands on 4 KB, has no room for more. Engines step
64 sessions at once by default."""
_HEADER_BYTES = 8
NUM_BYTES = _HEADER_BYTES + KEY_BYTES * MAX_KEYS
_NOTHING, _UNTOLD = 0, 1
"""Of the word for work: at rest; at work on no session in particular. Above that it is the number of sessions."""


class StepMemory:
    """Shared memory: the engine's loop writes, its servicer reads, above all when the writer is gone.

    The count is written last: a writer that ends half-way leaves that it was at work, and no wrong session.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Use a file of NUM_BYTES that both have; without one nobody else sees it."""
        self._memory = mmap.mmap(-1 if fd is None else fd, NUM_BYTES)
        self._head = memoryview(self._memory)[:_HEADER_BYTES].cast("Q")

    def work_on(self, keys: Sequence[bytes]) -> None:
        """What comes next is for these sessions, by their keys."""
        self._head[0] = _UNTOLD
        if 0 < len(keys) <= MAX_KEYS:
            told = b"".join(keys)
            self._memory[_HEADER_BYTES : _HEADER_BYTES + len(told)] = told
            self._head[0] = _UNTOLD + len(keys)

    def work(self) -> None:
        """What comes next is for no session in particular."""
        self._head[0] = _UNTOLD

    def rest(self) -> None:
        """Nothing is being done."""
        self._head[0] = _NOTHING

    def read_keys(self) -> bytes | None:
        """Whose work is being done, or was when the writer ended, as in `EngineEnd.session_keys`; None: not told."""
        work = self._head[0]
        num_keys = 0 if work == _NOTHING else work - _UNTOLD
        if work == _UNTOLD or num_keys > MAX_KEYS:
            return None
        return self._memory[_HEADER_BYTES : _HEADER_BYTES + KEY_BYTES * num_keys]


def new_step_file() -> int:
    """A file descriptor of anonymous memory for a StepMemory, to be inherited and closed."""
    fd = os.memfd_create("specdec-step")
    os.ftruncate(fd, NUM_BYTES)
    return fd
