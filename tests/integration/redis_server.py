"""Real Redis servers on loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A redis-server that can be stopped and started again on its port; it keeps nothing over a restart."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        address = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command = [program, *address, "--save", "", "--appendonly", "no", *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)
