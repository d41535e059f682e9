"""Open files of a process: as many as its user may have; a line in the log while there are none left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import time

import structlog

_MOST_FILES = 1 << 16
"""Files that a service takes at most: several for each of the most requests and idle connections."""
_LOOK_S = 1.0
"""Seconds between two looks."""
_QUIET_S = 60.0
"""Seconds between two lines about missing files."""
_log = structlog.get_logger(__name__)


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one: shells and systemd give 1,024, fewer than connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def watch() -> None:
    """Log `files_exhausted` while no file can be opened: libuv resets new connections without a word.

    Runs until cancelled.
    """
    quiet_until_s = float("-inf")
    while True:
        try:
            os.close(os.eventfd(0))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and time.monotonic() >= quiet_until_s:
                quiet_until_s = time.monotonic() + _QUIET_S
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                remedy = "raise the hard limit of open files: ulimit -Hn, LimitNOFILE of systemd"
                _log.error("files_exhausted", limit=limit, effect="new connections are reset", remedy=remedy)
        await asyncio.sleep(_LOOK_S)
