"""Whose a connection is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.adversary.socket_owner import owner_of

CONNECT = """
import socket, sys
port, to_port = map(int, sys.argv[1:])
connection = socket.socket()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
connection.bind(("127.0.0.1", port))
connection.connect(("127.0.0.1", to_port))
print("connected", flush=True)
sys.stdin.read()
"""


def test_processes_whose_connections_begin_at_one_port_are_told_apart_by_where_these_go() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket() as ours,
    ):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        ours.bind(("127.0.0.1", 0))
        port, to_ports = ours.getsockname()[1], [server.getsockname()[1] for server in (one, other)]
        ours.connect(("127.0.0.1", to_ports[0]))
        command = [sys.executable, "-c", CONNECT, str(port), str(to_ports[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"connected\n"
            pids = [os.getpid(), child.pid]
            assert [owner_of(port, to_port, pids) for to_port in to_ports] == pids
            assert owner_of(port, 1, pids) is None
            child.communicate()
