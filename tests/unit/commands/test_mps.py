"""NVIDIA MPS beside `specdec up`: started where engines share a GPU, ended with it, and done without where it fails."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from specdec.commands.up import mps
from specdec.commands.up.cluster import free_port
from specdec.commands.up.command import running_cluster
from specdec.commands.up.mps import (
    CLIENT_PRIORITY,
    CONTROL,
    LOG_DIRECTORY,
    PIPE_DIRECTORY,
    SWITCH,
    MpsTimeouts,
    mps_is_wanted,
    shared_gpus,
)
from specdec.commands.up.plan import LocalPlan
from specdec.commands.up.service_process import ServiceSpec

# A control daemon as NVIDIA's pages describe it: -f stays in the foreground and answers while its pid file is there.
# Commands come over its standard input; a front end without a daemon ends with 1.
FAKE = """#!/bin/sh
pipe="${CUDA_MPS_PIPE_DIRECTORY:-%(default)s}"
echo "$* visible=${CUDA_VISIBLE_DEVICES-unset}" >> "%(calls)s"
if [ "$1" = "-f" ]; then
  %(start)s
  trap 'rm -f "$pipe/pid"; exit 0' TERM
  echo $$ > "$pipe/pid"
  while [ -e "$pipe/pid" ]; do sleep 0.02; done
  exit 0
fi
read -r command
echo "$command" >> "%(calls)s"
[ -e "$pipe/pid" ] || exit 1
case "$command" in
  start_server*) %(server)s ;;
  get_server_list) cat "$pipe/server" 2>/dev/null; exit 0 ;;
  quit) %(quit)s ;;
esac
"""
TARGET = ServiceSpec(name="target", role="target", module="specdec.target_service", address="", gpus=(0, 1))
DRAFT = ServiceSpec(
    name="draft", role="draft", module="specdec.draft_service", address="", gpus=(0,), environment={"A": "b"}
)
COORDINATOR = ServiceSpec(name="coordinator", role="coordinator", module="specdec.coordinator", address="")
SPECS = [TARGET, DRAFT, COORDINATOR]
SHORT = MpsTimeouts(start_s=1.0, stop_s=0.5)
LONG = MpsTimeouts(start_s=60.0, stop_s=60.0)
GOOD_CLIENT = ("true",)
shared_by_mps = partial(mps.shared_by_mps, probe=GOOD_CLIENT)
Install = Callable[..., dict[str, str]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Puts a daemon's program on a PATH; returns the environment in which it is found."""

    def write(
        start: str = ":", server: str = 'echo 77 > "$pipe/server"', quit: str = 'rm "$pipe/pid"'
    ) -> dict[str, str]:
        (tmp_path / "default").mkdir(exist_ok=True)
        program = tmp_path / "bin" / CONTROL
        program.parent.mkdir(exist_ok=True)
        names = {"default": tmp_path / "default", "calls": tmp_path / "calls"}
        program.write_text(FAKE % {**names, "start": start, "server": server, "quit": quit})
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return {"PATH": f"{program.parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "3"}

    return write


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def daemons() -> list[psutil.Process]:
    """Children of this process only: a shell that forks is two of one name for a moment."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # which a zombie is, too
            found += [child] if CONTROL in " ".join(child.cmdline()) else []
    return found


def are_no_clients(specs: Sequence[ServiceSpec]) -> bool:
    """Whether services on GPUs are led to a folder without a daemon, and are otherwise as they were."""
    target, draft, coordinator = specs
    folders = {spec.environment[PIPE_DIRECTORY] for spec in (target, draft)}
    same = draft.environment == {"A": "b", PIPE_DIRECTORY: next(iter(folders))} and coordinator == COORDINATOR
    return same and len(folders) == 1 and not list(Path(folders.pop()).iterdir())


def test_gpus_are_shared_where_two_services_compute_on_one() -> None:
    assert shared_gpus(SPECS) == [0]
    assert shared_gpus([TARGET, COORDINATOR]) == []


def test_a_daemon_is_started_for_engines_on_one_gpu_and_told_to_quit_at_the_end(
    tmp_path: Path, install: Install
) -> None:
    told: list[str] = []
    with shared_by_mps(SPECS, told.append, environment=install(), timeouts=LONG) as specs:
        target, draft, coordinator = specs
        folders = [Path(target.environment[name]) for name in (PIPE_DIRECTORY, LOG_DIRECTORY)]
        assert all(folder.is_dir() for folder in folders)
        assert len(daemons()) == 1
        assert draft.environment == {"A": "b", **target.environment, CLIENT_PRIORITY: "1"}
        assert CLIENT_PRIORITY not in target.environment
        assert coordinator == COORDINATOR
    assert told == [
        "GPU 0 is shared: NVIDIA MPS, started for it, runs kernels of its engines side by side, the target's first."
    ]
    assert calls(tmp_path)[-1] == "quit"
    assert "-f visible=unset" in calls(tmp_path), "clients name devices by what the daemon sees"
    assert daemons() == []
    assert not any(folder.exists() for folder in folders)


def test_a_daemon_that_runs_already_is_used_and_left_running(tmp_path: Path, install: Install) -> None:
    environment = install()
    (tmp_path / "default" / "pid").write_text("1")
    told: list[str] = []
    with shared_by_mps(SPECS, told.append, environment=environment, timeouts=LONG) as (target, draft, _):
        assert target == TARGET, "it is found where it was found before"
        assert draft.environment == {"A": "b", CLIENT_PRIORITY: "1"}
    assert "that runs already" in told[0]
    assert "quit" not in calls(tmp_path)


def test_a_priority_of_the_users_own_is_kept(install: Install) -> None:
    environment = {**install(), CLIENT_PRIORITY: "0"}
    with shared_by_mps(SPECS, lambda line: None, environment=environment, timeouts=LONG) as (_, draft, _):
        assert CLIENT_PRIORITY not in draft.environment


@pytest.mark.parametrize(
    ("how", "timeouts", "reason"),
    [
        ({"start": "echo no device >&2; exit 3"}, LONG, f"{CONTROL} ended with exit code 3: no device"),
        ({"start": "sleep 100"}, SHORT, f"{CONTROL} had no server running within 1 s"),
        ({"server": ":"}, SHORT, f"{CONTROL} had no server running within 1 s"),
        ({"server": "sleep 100"}, SHORT, f"{CONTROL} had no server running within 1 s"),
    ],
    ids=["crashes", "hangs", "starts no server", "hangs when asked"],
)
def test_services_start_without_a_daemon_that_fails(
    how: dict[str, str], timeouts: MpsTimeouts, reason: str, install: Install
) -> None:
    told: list[str] = []
    with shared_by_mps(SPECS, told.append, environment=install(**how), timeouts=timeouts) as specs:
        assert are_no_clients(specs)
        assert daemons() == [], "what does not work is not left behind"
    assert told == [f"GPU 0 is shared: its engines take turns, as {reason}."]


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (
            ("sleep", "100"),
            f"a first client of NVIDIA MPS hung for 0.3 s; end its daemon (echo quit | {CONTROL}) and start again",
        ),
        (
            ("sh", "-c", "echo cuInit returned 805 >&2; exit 1"),
            "a first client of NVIDIA MPS failed: cuInit returned 805",
        ),
    ],
    ids=["hangs", "fails"],
)
@pytest.mark.parametrize("runs_already", [False, True])
def test_services_start_without_a_daemon_under_which_a_first_client_has_no_gpu(
    runs_already: bool, probe: Sequence[str], reason: str, tmp_path: Path, install: Install
) -> None:
    environment, told = install(), list[str]()
    if runs_already:
        (tmp_path / "default" / "pid").write_text("1")
    timeouts = MpsTimeouts(start_s=60.0, stop_s=60.0, probe_s=0.3)
    with mps.shared_by_mps(SPECS, told.append, environment=environment, timeouts=timeouts, probe=probe) as specs:
        assert are_no_clients(specs)
        assert daemons() == []
    assert told == [f"GPU 0 is shared: its engines take turns, as {reason}."]
    assert ("quit" in calls(tmp_path)) is not runs_already


def test_the_first_client_sees_the_devices_that_the_services_see(tmp_path: Path, install: Install) -> None:
    probe = ("sh", "-c", f'echo "$CUDA_VISIBLE_DEVICES, $0" >> {tmp_path}/probed')
    with mps.shared_by_mps(SPECS, lambda line: None, environment=install(), timeouts=LONG, probe=probe):
        pass
    assert (tmp_path / "probed").read_text() == "3, 0\n", "GPU 0 of a machine may be another one"


DRIVER = """
#include <cstdio>
#define CALL(name, ...) extern "C" int name(__VA_ARGS__) { std::puts(#name); return %(status)s; }
CALL(cuInit, unsigned) CALL(cuDeviceGet, int *, int number) CALL(cuDevicePrimaryCtxRetain, void **, int)
CALL(cuCtxSetCurrent, void *) CALL(cuCtxSynchronize)
"""


@pytest.mark.parametrize("status", [0, 805])
def test_the_first_client_makes_a_context_by_the_driver_alone(status: int, tmp_path: Path) -> None:
    (tmp_path / "driver.cpp").write_text(DRIVER % {"status": status})
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", str(tmp_path / "driver.cpp"), "-o", str(library)], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", mps._PROBE, "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == ((1, "cuInit returned 805") if status else (0, ""))
    assert len(done.stdout.split()) == (1 if status else 5)


@pytest.mark.parametrize(("value", "is_wanted"), [(None, True), ("1", True), ("0", False), ("False ", False)])
def test_a_variable_switches_it_off_in_all_commands(value: str | None, is_wanted: bool) -> None:
    assert mps_is_wanted({} if value is None else {SWITCH: value}) is is_wanted


def test_a_daemon_that_does_not_quit_is_killed(install: Install) -> None:
    environment = install(quit="sleep 100", start="trap '' TERM")
    with shared_by_mps(SPECS, lambda line: None, environment=environment, timeouts=MpsTimeouts(start_s=60, stop_s=0.2)):
        assert len(daemons()) == 1
    assert daemons() == []


def test_a_daemon_ends_with_a_start_that_fails(tmp_path: Path, install: Install) -> None:
    with pytest.raises(KeyboardInterrupt), shared_by_mps(SPECS, print, environment=install(), timeouts=LONG):
        raise KeyboardInterrupt
    assert calls(tmp_path)[-1] == "quit"
    assert daemons() == []


@pytest.mark.parametrize("is_installed", [True, False])
def test_nothing_is_started_where_it_is_not_wanted_or_not_there(
    is_installed: bool, tmp_path: Path, install: Install
) -> None:
    told: list[str] = []
    environment = install() if is_installed else {"PATH": str(tmp_path / "nothing")}
    with shared_by_mps(SPECS, told.append, is_wanted=not is_installed, environment=environment) as specs:
        assert are_no_clients(specs), "nor of a daemon that others started"
    why = "NVIDIA MPS is switched off" if is_installed else f"{CONTROL} (NVIDIA MPS) is not on the PATH"
    assert told == [f"GPU 0 is shared: its engines take turns, as {why}."]
    assert calls(tmp_path) == []


def test_engines_on_gpus_of_their_own_need_none(tmp_path: Path, install: Install) -> None:
    told: list[str] = []
    with shared_by_mps([TARGET, COORDINATOR], told.append, environment=install()) as specs:
        assert specs == [TARGET, COORDINATOR]
    assert (told, calls(tmp_path)) == ([], [])


def test_services_of_up_are_clients_of_a_daemon_that_ends_after_them(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "health").touch()
    serve = ("--bind", "127.0.0.1", "--directory", str(tmp_path))
    specs = []
    for role in ("target", "draft"):
        port = free_port()
        address, arguments = f"127.0.0.1:{port}", (*serve, str(port))
        spec = ServiceSpec(
            name=role,
            role=role,
            module="http.server",
            address=address,
            arguments=arguments,
            gpus=(0,),
            speaks_http=True,
        )
        specs.append(spec)
    monkeypatch.setattr("specdec.commands.up.command.plan_services", lambda plan: specs)
    monkeypatch.setattr("specdec.commands.up.command.shared_by_mps", shared_by_mps)
    ends = f'ps -e -o args= | grep -c "[h]ttp.server.*{tmp_path.name}" > {tmp_path}/at_quit; rm "$pipe/pid"'
    for name, value in install(quit=ends).items():
        monkeypatch.setenv(name, value)
    output = io.StringIO()
    plan = LocalPlan(target_model="t", draft_model="d")
    with running_cluster(plan, Console(file=output, width=200), tmp_path / "logs") as cluster:
        pids = [service.pid for service in cluster.services.values()]
        folders = {psutil.Process(pid).environ()[PIPE_DIRECTORY] for pid in pids}
        assert len(folders) == 1
    assert (tmp_path / "at_quit").read_text().split() == ["0"]
    assert "NVIDIA MPS, started for it," in output.getvalue()
    with running_cluster(plan, Console(file=output, width=200), tmp_path / "logs", mps=False) as cluster:
        folders = {psutil.Process(each.pid).environ()[PIPE_DIRECTORY] for each in cluster.services.values()}
        assert not list(Path(folders.pop()).iterdir())
    assert "NVIDIA MPS is switched off" in output.getvalue()
