"""A host for each service: its memory limit, part of the processors and disk, of the sizes that Compose gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.adversary.hosts.cgroups import Cgroup, Cgroups, NoCgroups, unique_name
from tests.adversary.hosts.disk import Disk, NoDisk
from tests.adversary.topology import REDIS, role_of

COMPOSE = Path(__file__).resolve().parents[3] / "deploy" / "compose.yaml"
DISK_BYTES = 64 * 2**20
"""Of /tmp."""
_SIZE = re.compile(r"(?:\$\{\w+:-)?(\d+)([kmg])\}?")


def memory_limits(path: Path = COMPOSE) -> dict[str, int]:
    """Bytes by role, that of Redis included; the chart's coordinator and gateway have the same."""
    services: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
    roles = ("target", "draft", "coordinator", "gateway", REDIS)
    return {role: _bytes(services[role]["deploy"]["resources"]["limits"]["memory"]) for role in roles}


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no size")
    return int(found[1]) << {"k": 10, "m": 20, "g": 30}[found[2]]


@dataclass(frozen=True, slots=True)
class Host:
    """What one service lives on."""

    cgroup: Cgroup
    disk: Disk


class Hosts:
    """Hosts of services by name. Use as a context manager; services must end before."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self._names = names
        self._folder = folder
        self._hosts: dict[str, Host] = {}
        self._redis: Cgroup | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        limits = memory_limits()
        with ExitStack() as stack:
            groups = stack.enter_context(Cgroups(unique_name()))
            for name in self._names:
                disk = stack.enter_context(Disk(self._folder / name, DISK_BYTES))
                self._hosts[name] = Host(groups.make(name, limits[role_of(name)]), disk)
            self._redis = groups.make(REDIS, limits[REDIS])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def add(self, name: str, pid: int) -> None:
        """Let a process live on the host of this name."""
        cgroup = self._redis if name == REDIS else self._hosts[name].cgroup
        assert cgroup is not None
        cgroup.add(pid)

    def peaks(self) -> dict[str, tuple[int, int]]:
        """Bytes of memory at their highest by service, and how many processes were killed for want of memory."""
        groups = {name: host.cgroup for name, host in self._hosts.items()}
        if self._redis is not None:
            groups[REDIS] = self._redis
        return {name: (group.peak_bytes, group.num_killed) for name, group in groups.items()}


def why_none(folder: Path) -> str | None:
    """Why this machine gives services no hosts of their own; None: it does."""
    try:
        with Hosts(["gateway-0"], folder / "tried"):
            return None
    except (NoCgroups, NoDisk) as error:
        return str(error)


def memory_text(peaks: Mapping[str, tuple[int, int]]) -> str:
    """A table of what `Hosts.peaks` returned, beside the limits."""
    limits = memory_limits()
    rows = [
        f"| {name} | {peak >> 20} | {limits[role_of(name)] >> 20} | {num_killed} |"
        for name, (peak, num_killed) in sorted(peaks.items())
    ]
    head = ["| service | MiB at the highest, with cached files | limit | processes killed |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])
