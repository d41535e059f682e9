"""Whatever connects to the port of metrics, the service keeps its threads and descriptors for its own work."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from specdec.service.metrics_endpoint import metrics_endpoint
from specdec.service.settings import ServiceSettings

MOST_THREADS = 100
"""Far fewer than there are requests. Of those that wait for the page there are sixteen."""
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
LEAVE = """
import socket, sys
for _ in range(400):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
        connection.sendall(sys.argv[2].encode())
"""


class SlowPage(Collector):
    """Takes as long as that of a replica with many series, on a busy machine."""

    def collect(self) -> Iterator[object]:  # type: ignore[override]
        time.sleep(0.05)
        yield from ()


def test_scrapers_that_ask_and_leave_pile_up_no_threads() -> None:
    registry = CollectorRegistry()
    registry.register(SlowPage())
    with metrics_endpoint(ServiceSettings(host="127.0.0.1", metrics_port=0), registry) as port:
        leaving = subprocess.Popen([sys.executable, "-c", LEAVE, str(port), REQUEST.decode()])
        most = 0
        while leaving.poll() is None:
            most = max(most, threading.active_count())
            time.sleep(0.005)
        assert leaving.returncode == 0
        assert most <= MOST_THREADS
        status = ""
        while status != "200":  # 503 while there are others
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(REQUEST)
                status = connection.recv(100).decode().split()[1]
            assert status in ("200", "503")
