"""Progress of a command."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape

_QUIET_S = 2.0
"""Least seconds between two lines where the output is no terminal."""


class Progress:
    """Context manager with a status line on a terminal; elsewhere it prints a line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting")
        self._part = ""
        self._told_s = 0.0

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status.stop()

    def part(self, name: str) -> None:
        """Begin a part of the work."""
        self._part = name
        self._told_s = 0.0
        self.tell("starting")

    def tell(self, what: str) -> None:
        """Report the state of the part."""
        line = escape(f"{self._part}: {what}" if self._part else what)
        if self._console.is_terminal:
            self._status.update(line)
        elif time.monotonic() > self._told_s + _QUIET_S:
            self._told_s = time.monotonic()
            self._console.print(line, highlight=False, soft_wrap=True)
