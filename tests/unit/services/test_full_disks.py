"""A full disk and a log that nobody reads cost figures and lines, never a process or a pause."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from specdec.telemetry import setup_logging

_FIGURES = """
import os, sys
from pathlib import Path
from prometheus_client import CollectorRegistry, generate_latest
from specdec.telemetry import *
folder = sys.argv[1]
enable_multiprocess_metrics(folder)
metrics = CoordinatorMetrics(CollectorRegistry())
metrics.requests.labels("OK").inc(3)
if sys.argv[2] == "filled":
    with open(Path(folder, "filler"), "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass
for index in range(2000):
    metrics.requests.labels(f"code {index}").inc()
    metrics.replicas.labels(f"role {index}", "ready").set(1)
metrics.requests.labels("OK").inc()
assert metrics.requests.labels("code 1999")._value.get() == 1
print(generate_latest(scrape_registry(CollectorRegistry())).decode())
"""
_LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
"""


def page_of_a_full_disk(folder: Path) -> str:
    """The page of a process whose metrics' disk is full. Where no disk can be mounted, files are limited instead."""
    mount = f'mount -t tmpfs -o size=600k none {folder} && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, "sh", sys.executable, "-c", _FIGURES, str(folder), "filled"]
    if subprocess.run(["unshare", "-Urm", "sh", "-c", f"mount -t tmpfs none {folder}"], capture_output=True).returncode:
        command = [sys.executable, "-c", _LIMITED + _FIGURES, str(folder), "limited"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "metrics_not_exported" in result.stdout + result.stderr
    return result.stdout


def test_metrics_go_on_without_the_figures_for_which_there_is_no_room(tmp_path: Path) -> None:
    page = page_of_a_full_disk(tmp_path).splitlines()
    assert 'specdec_coordinator_requests_total{outcome="OK"} 4.0' in page


_LOG = """
import sys, time
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from specdec.telemetry import BuildInfo, setup_logging
setup_logging("gateway")
registry = CollectorRegistry()
BuildInfo(registry, "gateway")
log = structlog.get_logger("test")
for index in range(12000):
    log.info("line", index=index, text="x" * 1000)
print(registry.get_sample_value("specdec_log_lines_dropped_total"), flush=True)
sys.stdin.readline()
log.info("afterwards")
"""


def test_a_log_that_nobody_reads_blocks_nothing_and_tells_what_it_dropped() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _LOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    num_dropped = float(process.stdout.readline())
    assert num_dropped > 1000
    _, log = process.communicate("go on\n", timeout=60)
    lines = [json.loads(line) for line in log.splitlines()]
    assert lines[0]["index"] == 0
    assert {"line", "log_lines_dropped", "afterwards"} == {line["event"] for line in lines}
    told = sum(line["num_lines"] for line in lines if line["event"] == "log_lines_dropped")
    assert num_dropped == told == 12000 - sum(line["event"] == "line" for line in lines)


def test_control_characters_of_clients_reach_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        setup_logging("target", "info", "console")
        try:
            raise ValueError("\x1b[2Jgone\nforged")
        except ValueError:
            structlog.get_logger("specdec.test").exception("failed\x1b]0;title\x07", request_id="a\x9b31m\nforged line")
        logging.getLogger("library").warning("says %s", "\x1b[31m")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.reset_defaults()
    output = capsys.readouterr().err
    assert not set(output) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))}
    assert "\\x1b[2Jgone" in output
    assert not any(line.startswith("forged line") for line in output.splitlines())
