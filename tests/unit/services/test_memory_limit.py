"""A process's memory limit is found in cgroups of both versions, and shared by its processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec.service.byte_budget import ByteBudget
from specdec.service.memory_limit import budget_bytes, limit_bytes
from specdec.wire.errors import Overloaded

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 2**20


def made(tmp_path: Path, cgroup: str, files: dict[str, str], resident_pages: int = 0) -> tuple[Path, Path]:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    root.mkdir()
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "statm").write_text(f"9 {resident_pages} 0 0 0 0 0\n")
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root, proc


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/\n", {"memory.max": f"{64 * MIB}\n"}, 64 * MIB),
        ("0::/pod/one\n", {"pod/memory.max": f"{64 * MIB}\n", "pod/one/memory.max": "max\n"}, 64 * MIB),
        ("0::/pod/one\n", {"pod/memory.max": f"{64 * MIB}\n", "pod/one/memory.max": f"{32 * MIB}\n"}, 32 * MIB),
        ("0::/../elsewhere\n", {"memory.max": f"{64 * MIB}\n"}, 64 * MIB),
        ("0::/\n", {"memory.max": "max\n"}, MACHINE),
        (
            "5:cpu,memory:/docker/x\n4:pids:/\n",
            {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory/docker/x/memory.limit_in_bytes": "1048576\n"},
            MIB,
        ),
        ("3:memory:/on/the/host\n", {"memory/memory.limit_in_bytes": f"{64 * MIB}\n"}, 64 * MIB),
        ("", {}, MACHINE),
    ],
)
def test_the_lowest_limit_on_the_way_to_the_root_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int
) -> None:
    assert limit_bytes(*made(tmp_path, cgroup, files)) == limit


def test_a_budget_leaves_what_the_process_has_already_and_is_shared(tmp_path: Path) -> None:
    pages = 10 * MIB // os.sysconf("SC_PAGE_SIZE")
    root, proc = made(tmp_path, "0::/\n", {"memory.max": str(100 * MIB)}, pages)
    assert budget_bytes(1, root, proc) == int(90 * MIB * 0.6)
    assert budget_bytes(2, root, proc) == int(40 * MIB * 0.6)
    assert budget_bytes(99, root, proc) == 0


def test_an_address_whose_requests_each_name_another_client_has_half() -> None:
    budget = ByteBudget(total_bytes=100, client_bytes=25)
    with budget.hold("a", 25, address="x"), budget.hold("b", 25, address="x"):
        with pytest.raises(Overloaded, match="address's"), budget.hold("c", 1, address="x"):
            pass
        with budget.hold("c", 25, address="y"), budget.hold("d", 25):
            pass
    assert budget.num_bytes == 0
    with budget.hold("a", 90, address="x"):  # alone it may be of any size
        pass


def test_what_grows_is_refused_when_others_hold_the_rest_and_alone_it_may_be_of_any_size() -> None:
    budget = ByteBudget(total_bytes=100, client_bytes=60)
    with budget.hold("a") as alone:
        alone.grow(50)
        alone.grow(500)
    assert budget.num_bytes == 0
    with budget.hold("a", 50), budget.hold("b") as other:
        other.grow(50)
        with pytest.raises(Overloaded):
            other.grow(1)
        with budget.hold("a") as same, pytest.raises(Overloaded, match="tenant's"):
            same.grow(11)
    assert budget.num_bytes == 0
