"""The chart's Redis, run here as its container would run it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specdec.commands.up.cluster import free_port
from tests.chart.rendered import Document, component
from tests.support.services.faults import eventually


@dataclass(frozen=True)
class Started:
    """A Redis that runs as its container would; its files are in `folder`, certificates in `folder`/tls."""

    port: int
    container: Document
    folder: Path
    environment: dict[str, str]

    def here(self, command: list[str]) -> list[str]:
        """The container's command with its files in `folder` and its port."""
        places = {"/etc/redis-tls": str(self.folder / "tls"), "/tmp": str(self.folder), "6379": str(self.port)}
        return [re.sub("|".join(places), lambda match: places[match[0]], word) for word in command]

    def probe(self, name: str) -> int:
        """Runs a probe of the container; 0 when it passes."""
        command = self.here(self.container[name]["exec"]["command"])
        # The container's port is redis-cli's default.
        command = [word.replace("redis-cli", f"redis-cli -p {self.port}") for word in command]
        if command[0].startswith("redis-cli"):
            command = [*command[0].split(), *command[1:]]
        return subprocess.run(command, env=self.environment, capture_output=True, check=False).returncode


@contextmanager
def started(documents: list[Document], folder: Path, password: str) -> Iterator[Started]:
    """Runs the container of the Redis Deployment on a port of its own."""
    deployment = next(d for d in documents if d["kind"] == "Deployment" and component(d) == "redis")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {"PATH": os.environ["PATH"], "REDISCLI_AUTH": password}
    redis = Started(free_port(), container, folder, environment)
    command = redis.here([*container["command"], *container["args"], "--bind", "127.0.0.1"])
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield redis
    finally:
        process.kill()
        process.wait()


async def until_up(redis: Started) -> None:
    """Waits until the readiness probe passes."""

    async def is_up() -> bool:
        return await asyncio.to_thread(redis.probe, "readinessProbe") == 0

    await eventually(is_up, "the readiness probe passes")
