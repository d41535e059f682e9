"""Which process holds a connection of loopback; read from /proc, as fast as that can be."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

TABLES = {
    Path("/proc/net/tcp"): "0100007F",
    # gRPC's sockets speak both versions: to them 127.0.0.1 is ::ffff:127.0.0.1.
    Path("/proc/net/tcp6"): "0000000000000000FFFF00000100007F",
}
"""127.0.0.1, as each table writes it."""


def owner_of(port: int, to_port: int, pids: Iterable[int]) -> int | None:
    """The process, of these, that holds the connection from one port of 127.0.0.1 to another, if one does.

    Both count: the kernel gives a port to several connections that go to different ones.
    """
    inode = _inode_of(port, to_port)
    if inode is None:
        return None
    link = f"socket:[{inode}]"
    for pid in pids:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path) == link:
                        return pid
    return None


def children_of(pid: int) -> list[int]:
    """The processes that a process has started from its main thread."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _inode_of(port: int, to_port: int) -> str | None:
    """The socket whose ends they are; connections that are over have none."""
    for table, loopback in TABLES.items():
        local, remote = f"{loopback}:{port:04X}", f"{loopback}:{to_port:04X}"
        for line in table.read_text().splitlines():
            if local in line:
                fields = line.split()
                if fields[1:3] == [local, remote] and fields[9] != "0":
                    return fields[9]
    return None
