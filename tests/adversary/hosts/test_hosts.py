"""Hosts: limits are those of Compose, groups of both versions are written as the kernel reads them, disks get full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from specdec.service.memory_limit import limit_bytes
from tests.adversary.hosts.cgroups import Cgroups, NoCgroups
from tests.adversary.hosts.hosts import Hosts, memory_limits, memory_text, why_none

MIB = 2**20


def tree(tmp_path: Path, cgroup: str, *folders: str) -> tuple[Path, Path]:
    """A made-up /sys/fs/cgroup and /proc/self."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    for folder in ("", *folders):
        (root / folder).mkdir(parents=True, exist_ok=True)
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    return root, proc


def test_the_limits_are_those_of_compose() -> None:
    limits = memory_limits()
    assert limits["coordinator"] == 1024 * MIB and limits["gateway"] == 512 * MIB
    assert limits.keys() == {"target", "draft", "coordinator", "gateway", "redis"}
    assert "| gateway-0 | 7 | 512 | 1 |" in memory_text({"gateway-0": (7 * MIB, 1)})


@pytest.mark.parametrize(
    ("cgroup", "folders", "where", "slow", "starved"),
    [
        (
            "4:memory:/a\n1:cpu:/\n0::/\n",
            ("memory/a", "cpu"),
            {"memory.limit_in_bytes": "memory/a", "cpu.shares": "cpu"},
            ("cpu.cfs_quota_us", "5000"),
            ("cpu.shares", "2"),
        ),
        (
            "0::/a\n",
            (),
            {"memory.max": "", "cpu.weight": ""},
            ("cpu.max", "5000 100000"),
            ("cpu.weight", "1"),
        ),
    ],
    ids=["version 1", "version 2"],
)
def test_groups_are_written_as_each_version_reads_them(
    tmp_path: Path,
    cgroup: str,
    folders: tuple[str, ...],
    where: dict[str, str],
    slow: tuple[str, str],
    starved: tuple[str, str],
) -> None:
    root, proc = tree(tmp_path, cgroup, *folders)
    with Cgroups("run", root, proc) as groups:
        group = groups.make("gateway-0", 512 * MIB)
        group.add(7)
        limit, shares = where
        assert group.memory == root / where[limit] / "run" / "gateway-0"
        assert group.cpu == root / where[shares] / "run" / "gateway-0"
        assert (group.memory / limit).read_text() == str(512 * MIB)
        assert {(folder / "cgroup.procs").read_text() for folder in (group.memory, group.cpu)} == {"7"}
        for act, (name, text) in ((partial(group.slow, 0.05), slow), (group.starve, starved)):
            act()
            assert (group.cpu / name).read_text() == text
            group.relieve()
            assert (group.cpu / name).read_text() != text
        for path in [*group.memory.iterdir(), *(group.cpu.iterdir() if group.cpu != group.memory else ())]:
            path.unlink()  # files of the kernel go with their folder
    assert not group.memory.exists() and not group.cpu.exists()


def test_a_machine_without_groups_says_so(tmp_path: Path) -> None:
    root, proc = tree(tmp_path, "4:memory:/nowhere\n1:cpu:/\n")
    with pytest.raises(NoCgroups, match="nowhere"), Cgroups("run", root, proc):
        pass


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if (reason := why_none(tmp_path)) is not None:
        pytest.skip(f"only where hosts can be made: {reason}")
    with Hosts(["gateway-0", "target-0"], tmp_path) as made:
        yield made


def test_a_service_on_a_host_has_its_limit_and_its_full_disk_takes_nothing(hosts: Hosts, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        hosts.add("gateway-0", process.pid)
        assert limit_bytes(proc=Path(f"/proc/{process.pid}")) == memory_limits()["gateway"]
        process.kill()
    disk = hosts["target-0"].disk
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        (disk.folder / "target-0.log").write_text("a line\n" * 1000)
    disk.drain()
    (disk.folder / "target-0.log").write_text("a line\n")
    assert os.statvfs(disk.folder).f_blocks * os.statvfs(disk.folder).f_frsize == 64 * MIB
    assert hosts.peaks()["gateway-0"][1] == 0
    disk.__exit__()
    assert (tmp_path / "target-0.log").read_text() == "a line\n"
