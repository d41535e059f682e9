"""What gives no sign of life is ended within ten seconds; what only lacks a processor is not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specdec.commands import health
from specdec.commands.up.cluster import Cluster, free_port
from specdec.commands.up.service_process import ServiceSpec
from specdec.commands.up.supervision import Supervision
from specdec.service import standstill
from specdec.service.standstill import Standstill, Starvation, counted_s
from specdec.wire.backoff import Backoff, RestartPolicy

_SERVER = "http.server"
_WITHIN_S = 60.0


class StarvedFor:
    """In `Starvation`'s place: the process waits for a processor for a fixed fraction of each look's second."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._has_begun = False

    def take_s(self) -> float:
        was_begun, self._has_begun = self._has_begun, True
        return self._share if was_begun else 0.0


def given_up_after(share: float, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(standstill, "Starvation", lambda pid: StarvedFor(share))
    judged = Standstill(4.0)
    return next(second for second in range(1000) if judged.is_hung(1, float(second)))


def test_time_without_a_processor_counts_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_up_after(0.0, monkeypatch) == 4
    assert given_up_after(0.5, monkeypatch) == 8
    assert given_up_after(1.0, monkeypatch) in (39, 40, 41)
    assert counted_s(1.0, 3.0) == 0.1


def test_a_process_that_waits_for_a_processor_is_starved_and_a_stopped_one_is_not() -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    core = {min(os.sched_getaffinity(0))}
    busy = [subprocess.Popen(spin, preexec_fn=lambda: os.sched_setaffinity(0, core)) for _ in range(3)]
    stopped = subprocess.Popen(spin, preexec_fn=lambda: os.sched_setaffinity(0, core))
    try:
        stopped.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{stopped.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        waits = {process.pid: Starvation(process.pid) for process in (*busy, stopped)}
        assert all(wait.take_s() == 0 for wait in waits.values())
        ends_s = time.monotonic() + _WITHIN_S
        while (waited_s := waits[busy[0].pid].take_s()) < 0.1:
            assert time.monotonic() < ends_s
            time.sleep(0.5)
        assert waited_s >= 0.1
        assert waits[stopped.pid].take_s() < 0.05
    finally:
        for process in (*busy, stopped):
            process.kill()
            process.wait()


@contextmanager
def server(tmp_path: Path) -> Iterator[tuple[Cluster, str]]:
    """A cluster of one HTTP server whose /health is a file."""
    (tmp_path / "health").write_text("")
    port = free_port()
    address = f"127.0.0.1:{port}"
    arguments = ("--bind", "127.0.0.1", "--directory", str(tmp_path), str(port))
    spec = ServiceSpec(
        name="gateway", role="gateway", module=_SERVER, address=address, arguments=arguments, speaks_http=True
    )
    with Cluster([spec], log_dir=tmp_path / "logs") as cluster:
        cluster.start()
        yield cluster, address


def test_a_stopped_service_is_killed_and_restarted_and_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    with server(tmp_path) as (cluster, _):
        supervision = Supervision(cluster, told.append, RestartPolicy(Backoff(0.01, 0.04)))
        pid = cluster.services["gateway"].pid
        assert pid is not None
        supervision.check()
        os.kill(pid, signal.SIGSTOP)
        ends_s = time.monotonic() + _WITHIN_S
        while not any("ready again" in line for line in told):
            assert time.monotonic() < ends_s, told
            supervision.check()
            time.sleep(0.02)
        assert cluster.services["gateway"].pid != pid
    silent = re.match(r"gateway does not answer for ([\d.]+) s", told[0])
    assert silent is not None and float(silent[1]) >= 4.0, told[0]
    assert told[1].startswith("gateway was killed by SIGKILL; restart in")


def test_a_health_check_ends_what_hangs_and_nothing_that_answers_or_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "_HUNG_S", 0.5)
    with server(tmp_path) as (cluster, address):
        pid = cluster.services["gateway"].pid
        assert pid is not None
        # This process's other children are services that other tests share.
        monkeypatch.setattr(health, "_children", {1: [pid]}.__getitem__)
        alive, hung = (["--address", f"http://{address}", f"--timeout-s={s}"] for s in (_WITHIN_S, 0.2))
        assert health.probe([*alive, "--end-hung"]) == 0
        assert health.probe(["--address", f"http://127.0.0.1:{free_port()}", "--timeout-s=0.2", "--end-hung"]) == 6
        assert cluster.services["gateway"].is_running
        os.kill(pid, signal.SIGSTOP)
        assert health.probe(hung) == 7
        assert cluster.services["gateway"].is_running
        assert health.probe([*hung, "--end-hung"]) == 7
        assert cluster.services["gateway"].wait(_WITHIN_S)
    assert f"process {pid} does not answer and is killed" in capsys.readouterr().err


def test_children_are_found_where_the_kernel_does_not_list_them(tmp_path: Path) -> None:
    for pid, name, parent in ((1, "init", 0), (20, "a b) S 1", 1), (21, "other", 20), (5, "sh", 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 0 0")
    (tmp_path / "99").mkdir()  # it has ended meanwhile
    assert health._children(1, tmp_path) == [5, 20]
    listed = tmp_path / "1" / "task" / "1"
    listed.mkdir(parents=True)
    (listed / "children").write_text("20 5 \n")
    assert health._children(1, tmp_path) == [20, 5]
