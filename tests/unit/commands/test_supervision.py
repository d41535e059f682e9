"""What ends is started again, with growing waits, and not for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from specdec.commands.errors import ClusterFailed
from specdec.commands.up.cluster import Cluster, ClusterTimeouts, free_port
from specdec.commands.up.service_process import ServiceSpec
from specdec.commands.up.supervision import Supervision
from specdec.wire.backoff import Backoff, RestartCount, RestartPolicy

DEADLINE_S = 120.0
POLL_S = 0.005
"""To look without a pause would take the processor from what is being looked at."""
FEW = RestartPolicy(Backoff(first_s=0.01, longest_s=0.04), max_futile=3)


def cluster_of(log_dir: Path, *arguments: str, timeouts: ClusterTimeouts | None = None) -> Cluster:
    """One service, which is `python -m` these arguments."""
    module, *flags = arguments
    spec = ServiceSpec(
        name="target", role="target", module=module, address=f"127.0.0.1:{free_port()}", arguments=tuple(flags)
    )
    return Cluster([spec], log_dir=log_dir, timeouts=timeouts)


def check_until_it_fails(supervision: Supervision) -> str:
    ends_s = time.monotonic() + DEADLINE_S
    with pytest.raises(ClusterFailed) as caught:
        while time.monotonic() < ends_s:
            supervision.check()
            time.sleep(POLL_S)
    return str(caught.value)


def test_a_service_that_ends_before_it_is_ready_again_and_again_is_given_up_with_its_log(tmp_path: Path) -> None:
    told: list[str] = []
    with cluster_of(tmp_path, "no_such_module_of_ours") as cluster:
        cluster.services["target"].start()
        message = check_until_it_fails(Supervision(cluster, told.append, FEW))
    assert message.startswith("target ended with exit code 1, 3 times before it was ready")
    assert "No module named no_such_module_of_ours" in message
    starts = [line for line in told if line == "target is restarted"]
    ends = [line for line in told if line.startswith("target ended with exit code 1; restart in 0.0")]
    assert (len(starts), len(ends)) == (3, 3)
    assert all("No module named no_such_module_of_ours" in line for line in ends)


def test_a_service_for_which_the_machine_has_no_process_is_tried_again_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    told: list[str] = []
    with cluster_of(tmp_path, "this") as cluster:
        service = cluster.services["target"]
        monkeypatch.setattr(service, "start", refuse)
        with pytest.raises(ClusterFailed, match=r"target cannot be started: .* unavailable"):
            cluster.start()
        supervision = Supervision(cluster, told.append, FEW)
        message = check_until_it_fails(supervision)
    assert message == "target cannot be started: [Errno 11] Resource temporarily unavailable, 3 times"
    assert len(told) == 3
    assert all("restart in 0.0" in line for line in told)


def test_a_service_that_starts_for_too_long_is_killed_and_counts_as_one_that_ended(tmp_path: Path) -> None:
    told: list[str] = []
    never_ready = ("http.server", "--bind", "127.0.0.1", "0")
    with cluster_of(tmp_path, *never_ready, timeouts=ClusterTimeouts(start_s=0.2)) as cluster:
        cluster.services["target"].start()
        supervision = Supervision(cluster, told.append, FEW)
        cluster.services["target"].kill()
        message = check_until_it_fails(supervision)
        assert not cluster.services["target"].is_running
    assert message.startswith("target was killed by SIGKILL, 3 times before it was ready")
    assert told.count("target did not become ready within 0.2 s, and is killed") == 3


def test_services_that_live_are_left_alone(tmp_path: Path) -> None:
    told: list[str] = []
    with cluster_of(tmp_path, "http.server", "--bind", "127.0.0.1", "0") as cluster:
        cluster.services["target"].start()
        pid = cluster.services["target"].pid
        supervision = Supervision(cluster, told.append, FEW)
        for _ in range(10):
            supervision.check()
        assert cluster.services["target"].pid == pid
    assert told == []


def test_each_fault_of_a_service_that_runs_and_does_not_serve_is_told_once_with_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.commands.up.supervision._ASK_S", 0.0)
    told: list[str] = []
    port = free_port()
    arguments = ("--bind", "127.0.0.1", "--directory", str(tmp_path), str(port))
    spec = ServiceSpec(
        name="target", role="target", module="http.server", address=f"127.0.0.1:{port}", arguments=arguments,
        speaks_http=True,
    )  # fmt: skip
    health, log = tmp_path / "health", tmp_path / "target.log"
    health.write_text("")
    with Cluster([spec], log_dir=tmp_path) as cluster:
        cluster.start()
        supervision = Supervision(cluster, told.append)
        for faults in ((), ("gone number=1", "gone number=2"), ("gone number=1",)):
            for fault in faults:
                health.unlink(missing_ok=True)
                with log.open("a") as lines:
                    lines.write(f"[warning  ] {fault}\n[info     ] engine_started\n" + "x\n" * 20)
                for _ in range(3):
                    supervision.check()
            health.write_text("")
            for _ in range(3):
                supervision.check()
    runs = f"target runs and does not serve. Its log, {log}: [warning  ] gone number"
    again = "target serves again, after 0 s"
    assert told == [f"{runs}=1", f"{runs}=2", again, f"{runs}=1", again]


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "2026 [error    ] startup_failed reason=x\n2026 [info     ] stopping\n",
            "2026 [error    ] startup_failed reason=x",
        ),
        ('{"event": "failed", "level": "error"}\n{"level": "info"}\n', '{"event": "failed", "level": "error"}'),
        (
            "Traceback (most recent call last):\n  File\ntorch.OutOfMemoryError: no room\n",
            "torch.OutOfMemoryError: no room",
        ),
        ("[info     ] ready\nKilled\n\n", "Killed"),
        ("", ""),
    ],
)
def test_the_line_that_is_shown_is_the_last_error_or_else_the_last_line(tmp_path: Path, log: str, line: str) -> None:
    cluster = cluster_of(tmp_path, "this")
    (tmp_path / "target.log").write_text(log)
    assert cluster.services["target"].last_error_line() == line


def test_the_line_that_is_shown_is_in_the_last_quarter_of_a_mebibyte_also_of_a_log_that_was_emptied(
    tmp_path: Path,
) -> None:
    cluster = cluster_of(tmp_path, "this")
    log = tmp_path / "target.log"
    log.write_bytes(b"[error] long ago\n" * 1000)
    cluster.services["target"].start()
    assert cluster.services["target"].wait(DEADLINE_S)
    log.write_text("[error] after it was emptied\n")
    assert cluster.services["target"].last_error_line() == "[error] after it was emptied"
    log.write_bytes(b"\xff" * (1 << 20) + b"\n[error] the last\n")
    assert cluster.services["target"].last_error_line() == "[error] the last"


def test_errors_of_a_former_life_are_not_shown(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, "this")
    (tmp_path / "target.log").write_text("[error    ] of a former life\n")
    cluster.services["target"].start()
    assert cluster.services["target"].wait(DEADLINE_S)
    assert cluster.services["target"].last_error_line().startswith("Namespaces are one honking great idea")


def test_waits_double_until_a_process_was_ready_for_a_steady_time_and_futile_starts_are_counted_in_a_row() -> None:
    restarts = RestartCount(RestartPolicy(Backoff(first_s=1.0, longest_s=4.0), steady_s=30.0, max_futile=2))
    assert [restarts.wait_after_end(lived_s) for lived_s in (5.0, 29.0, None, 0.0)] == [1.0, 2.0, 4.0, 4.0]
    assert restarts.wait_after_end(30.0) == 1.0
    assert not restarts.is_hopeless
    assert [restarts.wait_after_end(None), restarts.is_hopeless] == [2.0, False]
    assert [restarts.wait_after_end(None), restarts.is_hopeless] == [4.0, True]
    assert restarts.num_futile == 2
