"""Child processes of `specdec up`: they run a module, log to a file, and die with their parent."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from specdec.commands.errors import ClusterFailed
from specdec.commands.up.cluster import Cluster, ClusterTimeouts, free_port
from specdec.commands.up.command import LogView, stop_on_signals
from specdec.commands.up.service_process import ServiceProcess, ServiceSpec
from specdec.service.process import import_path

# Modules of the standard library that do what a service could do.
LISTENS = "http.server"
ENDS_AT_ONCE = "this"
DEADLINE_S = 60.0


def spec(module: str, *arguments: str, name: str = "target", cores: tuple[int, ...] = ()) -> ServiceSpec:
    return ServiceSpec(
        name=name, role="target", module=module, address=f"127.0.0.1:{free_port()}", arguments=arguments, cores=cores
    )


def wait_for_log(process: ServiceProcess, text: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while text not in "\n".join(process.last_log_lines()):
        assert time.monotonic() < deadline_s, process.last_log_lines()
        process.wait(0.02)


@pytest.fixture
def server(tmp_path: Path) -> ServiceProcess:
    core = min(os.sched_getaffinity(0))
    process = ServiceProcess(spec(LISTENS, "--bind", "127.0.0.1", "0", cores=(core,)), tmp_path / "log")
    process.start()
    wait_for_log(process, "Serving HTTP")
    return process


def test_it_runs_on_the_cores_it_was_given(server: ServiceProcess) -> None:
    assert server.pid is not None
    assert os.sched_getaffinity(server.pid) == {min(os.sched_getaffinity(0))}
    server.kill()


def test_terminate_lets_it_leave(server: ServiceProcess) -> None:
    server.terminate()
    assert server.wait(DEADLINE_S)
    assert not server.is_running
    assert server.told_to_end


def test_kill_ends_it_at_once_and_may_be_repeated(server: ServiceProcess) -> None:
    server.kill()
    server.kill()
    assert server.exit_code == -signal.SIGKILL


def test_kill_spares_a_process_that_has_the_number_of_a_service_that_ended(server: ServiceProcess) -> None:
    server.kill()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        try:
            assert server._process is not None
            server._process.pid = other.pid
            server.kill()
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(0.2)
        finally:
            other.kill()


def test_it_may_be_started_again(server: ServiceProcess) -> None:
    first_pid = server.pid
    server.kill()
    server.start()
    assert server.is_running
    assert server.pid != first_pid
    server.kill()


def test_it_starts_again_after_its_folder_of_logs_was_removed(tmp_path: Path) -> None:
    process = ServiceProcess(spec(ENDS_AT_ONCE), tmp_path / "logs" / "log")
    process.start()
    assert process.wait(DEADLINE_S)
    assert process.last_log_lines()


def test_it_runs_without_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = ServiceProcess(spec(ENDS_AT_ONCE), tmp_path / "file" / "log")
    process.start()
    assert process.wait(DEADLINE_S)
    assert process.exit_code == 0
    assert process.last_error_line() == ""


def test_a_log_that_cannot_be_made_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClusterFailed, match=r"^--log-dir: no folder for logs: "):
        Cluster([spec(ENDS_AT_ONCE)], log_dir=tmp_path / "file")
    (tmp_path / "target.log").mkdir()
    told = r"^--log-dir: cannot write .*/target\.log: Is a directory$"
    with Cluster([spec(ENDS_AT_ONCE)], log_dir=tmp_path) as cluster, pytest.raises(ClusterFailed, match=told):
        cluster.start()


def test_logs_are_shown_on_after_they_were_emptied_or_removed(tmp_path: Path) -> None:
    output = io.StringIO()
    cluster = Cluster([spec(ENDS_AT_ONCE)], log_dir=tmp_path)
    view, log = LogView(cluster, Console(file=output, width=80)), tmp_path / "target.log"
    for text in ("one, at length\n", "two\n", None, "three\n"):
        if text is None:
            log.unlink()
        else:
            log.write_text(text)
        view.show_new_lines()
    assert output.getvalue().split("\n") == ["target one, at length", "target two", "target three", ""]


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), stop_on_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, former)


def test_children_find_modules_without_a_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "", "__editable__.some.finder"])
    gone = tmp_path / "gone"
    gone.mkdir()
    program = "import os, subprocess, sys; os.rmdir(os.getcwd()); subprocess.run(sys.argv[1:], check=True)"
    command = [sys.executable, "-S", "-c", program, sys.executable, "-S", "-c", ""]
    subprocess.run(command, cwd=gone, env={**os.environ, "PYTHONPATH": import_path()}, check=True)


def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from specdec.commands.up.service_process import *\n"
        f"p = ServiceProcess(ServiceSpec(name='t', role='target', module={LISTENS!r}, address='', arguments=('0',)),"
        f" Path({str(tmp_path / 'log')!r}))\n"
        "p.start(); print(p.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        deadline_s = time.monotonic() + DEADLINE_S
        while "http" not in " ".join(child.cmdline()) or "child" in " ".join(child.cmdline()):
            assert time.monotonic() < deadline_s  # The signal is set before this program is entered.
        parent.kill()
    psutil.wait_procs([child], timeout=DEADLINE_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_service_that_ends_at_start_is_reported_with_its_log(tmp_path: Path) -> None:
    cluster = Cluster([spec(ENDS_AT_ONCE)], log_dir=tmp_path)
    with pytest.raises(ClusterFailed, match=r"(?s)target ended with exit code 0.*Namespaces are one honking"):
        cluster.start()


def test_a_service_that_never_becomes_healthy_is_reported_and_stopped(tmp_path: Path) -> None:
    timeouts = ClusterTimeouts(start_s=1.5, stop_s=5.0)
    cluster = Cluster([spec(LISTENS, "--bind", "127.0.0.1", "0")], log_dir=tmp_path, timeouts=timeouts)
    waits: list[str] = []
    with pytest.raises(ClusterFailed, match="did not become healthy within"):
        cluster.start(waits.append)
    assert waits == ["target to become healthy"]
    assert not cluster.services["target"].is_running


def test_who_waits_for_a_service_for_long_is_told_the_end_of_its_log(tmp_path: Path) -> None:
    timeouts = ClusterTimeouts(start_s=DEADLINE_S, patience_s=0.0)
    cluster = Cluster([spec(LISTENS, "--bind", "127.0.0.1", "0")], log_dir=tmp_path, timeouts=timeouts)
    service = cluster.services["target"]

    def leave_once_told(what: str) -> None:
        if what.startswith("target to become healthy; its log ends: Serving HTTP"):
            service.terminate()
            assert service.wait(DEADLINE_S)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        cluster.start(leave_once_told)


def test_a_port_in_use_is_reported_before_anything_starts(tmp_path: Path) -> None:
    taken = spec(LISTENS)
    process = ServiceProcess(
        spec(LISTENS, "--bind", "127.0.0.1", taken.address.rpartition(":")[2]), tmp_path / "first.log"
    )
    process.start()
    wait_for_log(process, "Serving HTTP")
    cluster = Cluster([taken], log_dir=tmp_path)
    with pytest.raises(ClusterFailed, match="is in use"):
        cluster.start()
    assert cluster.services["target"].pid is None
    process.kill()


def test_a_service_that_ends_later_is_noticed_unless_it_was_told_to(tmp_path: Path) -> None:
    cluster = Cluster([spec(LISTENS, "--bind", "127.0.0.1", "0")], log_dir=tmp_path)
    service = cluster.services["target"]
    service.start()
    wait_for_log(service, "Serving HTTP")
    assert service.pid is not None
    os.kill(service.pid, signal.SIGKILL)
    service.wait(DEADLINE_S)
    with pytest.raises(ClusterFailed, match="target was killed by SIGKILL"):
        cluster.check_running()
    service.start()
    cluster.kill("target")
    cluster.check_running()
