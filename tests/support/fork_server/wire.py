"""Jobs on a socket: one message each, with its files."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict

from tests.support.fork_server.jobs import Job

_MOST_BYTES = 1 << 18
_MOST_FILES = 32


def send_job(connection: socket.socket, job: Job, files: Sequence[int]) -> int:
    """Request a process; returns its id. Raises ConnectionError when the template has ended."""
    payload = json.dumps(asdict(job)).encode()
    assert len(payload) < _MOST_BYTES
    socket.send_fds(connection, [payload], list(files))
    answer = connection.recv(64)
    if not answer:
        raise ConnectionError("the template ended")
    return int(answer)


def receive_job(connection: socket.socket) -> tuple[Job, list[int]] | None:
    """The next job and its files' descriptors here; None when the socket is closed."""
    payload, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
    if not payload:
        return None
    fields = json.loads(payload)
    return Job(**{**fields, "argv": tuple(fields["argv"]), "fds": tuple(fields["fds"])}), files
