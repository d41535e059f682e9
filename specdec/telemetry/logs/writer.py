"""A log handler that never blocks its caller: a thread writes the lines, and lines for which there is no room are
dropped and counted."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

_MOST_BYTES = 4 * 2**20
"""Bytes of lines that wait for a reader of the log, at most."""
_LAST_LINES_S = 1.0
"""Seconds at the process's end for lines that wait."""


class ThreadedHandler(logging.Handler):
    """Writes to a stream by a thread of its own. A stream without a descriptor, as in tests, is written at once."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        try:
            self._descriptor: int | None = stream.fileno()
        except (io.UnsupportedOperation, AttributeError, ValueError):
            self._descriptor = None
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_untold = 0
        """Dropped lines that the log does not tell of yet."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.on_dropped: Callable[[], None] = lambda: None
        """Called for each line that is dropped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line; drop it if too many wait."""
        try:
            text = self.format(record) + "\n"
            if self._descriptor is None:
                self._stream.write(text)
                return
            line = text.encode("utf-8", "backslashreplace")
            if sys.is_finalizing():  # threads have ended, and to wait for a new one would hang the process
                if select.select((), (self._descriptor,), (), 0)[1]:
                    os.write(self._descriptor, line)
                return
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            is_dropped = self._num_bytes + len(line) > _MOST_BYTES
            if is_dropped:
                self._num_untold += 1
            else:
                self._lines.append(line)
                self._num_bytes += len(line)
            self._start()
            self._changed.notify_all()
        if is_dropped:
            self.on_dropped()

    def flush(self, most_s: float = 0.0) -> None:
        """Wait until all lines are written, at most `most_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes, most_s)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():  # the thread does not survive a fork
            self._thread = threading.Thread(target=self._write, name="log", daemon=True)
            self._thread.start()
            atexit.register(self.flush, _LAST_LINES_S)

    def _write(self) -> None:
        assert self._descriptor is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines[0]
            try:
                _write_all(self._descriptor, line)
                is_lost = False
            except OSError:  # no room on the disk, or the reader has gone
                is_lost = True
            with self._changed:
                self._lines.popleft()
                self._num_bytes -= len(line)
                self._num_untold += is_lost
                if self._num_untold and not is_lost:
                    told, self._num_untold = self._about_dropped(self._num_untold), 0
                    self._lines.appendleft(told)
                    self._num_bytes += len(told)
                self._changed.notify_all()
            if is_lost:
                self.on_dropped()

    def _about_dropped(self, num_lines: int) -> bytes:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        fields = {"timestamp": now, "level": "warning", "event": "log_lines_dropped", "num_lines": num_lines}
        return json.dumps(fields).encode() + b"\n"


def flush_logs() -> None:
    """Write the lines that wait, before the process ends without Python's own end."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ThreadedHandler):
            handler.flush(_LAST_LINES_S)


def count_dropped_lines(count: Callable[[], None]) -> None:
    """Call `count` for each line that this process's log drops from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ThreadedHandler):
            handler.on_dropped = count


def _write_all(descriptor: int, line: bytes) -> None:
    while line:
        with contextlib.suppress(BlockingIOError):
            line = line[os.write(descriptor, line) :]
            continue
        time.sleep(0.01)
