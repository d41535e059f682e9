"""Logs as JSON lines, and metrics with unique names that can be scraped from several processes."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from specdec.telemetry import (
    BuildInfo,
    CoordinatorMetrics,
    DraftMetrics,
    RelayMetrics,
    TargetMetrics,
    forget_gauges,
    scrape_registry,
    setup_logging,
)

_LOGS_AT_THE_END = """
import logging
from specdec.telemetry import setup_logging
setup_logging("target")
log = logging.getLogger()
log.warning("first")
class Late:
    def __del__(self):
        log.error("late")
late = Late()
late.itself = late
"""


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("restored_logging")
def test_log_lines_are_json_with_ids_as_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("target", "info", "json")
    log = structlog.get_logger("specdec.test")
    log.debug("too_fine")
    log.info("session_opened", session="o/r/0", epoch=1)
    logging.getLogger("library").warning("says %d", 7)

    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["event"] == "session_opened"
    assert (first["session"], first["epoch"], first["service"], first["level"]) == (
        "o/r/0",
        1,
        "target",
        "info",
    )
    assert (second["event"], second["logger"]) == ("says 7", "library")


def test_a_line_that_is_logged_while_python_ends_is_written_and_keeps_no_process_alive() -> None:
    ended = subprocess.run([sys.executable, "-c", _LOGS_AT_THE_END], stderr=subprocess.PIPE, check=True, timeout=60)
    assert [json.loads(line)["event"] for line in ended.stderr.splitlines()] == ["first", "late"]


@pytest.mark.usefixtures("restored_logging")
def test_a_log_line_begins_with_when_how_bad_where_and_what(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("target", "info", "json")
    structlog.get_logger("specdec.test").info("session_opened", session="o/r/0")
    fields = json.loads(capsys.readouterr().err)
    assert list(fields) == ["timestamp", "level", "service", "event", "session", "logger"]


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_tracebacks_never_show_local_variables(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    setup_logging("target", "info", log_format)
    prompt = "what the client asked"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        structlog.get_logger("specdec.test").exception("failed")

    output = capsys.readouterr().err
    assert "ValueError" in output
    assert prompt not in output


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("level", ["info", "debug"])
def test_urls_that_models_are_fetched_from_are_not_logged(capsys: pytest.CaptureFixture[str], level: str) -> None:
    setup_logging("target-engine", level)
    library = type(huggingface_hub.get_session()).__module__.partition(".")[0]
    log = logging.getLogger(library)
    log.info("HTTP Request: GET %s", "https://hub/file?X-Amz-Signature=hunter2")
    log.warning("no answer")
    logged = capsys.readouterr().err
    assert "hunter2" not in logged
    assert "no answer" in logged


ON_EVERY_SERVICE = ["requests_total", "tokens_total", "queue_length", "steps_total"]
ON_ENGINES = [*ON_EVERY_SERVICE, "step_seconds", "rollbacks_total", "kv_blocks_used"]
LATENCY = ["time_to_first_token_seconds", "inter_token_seconds"]
PAYING = ["decode_seconds_total", "plain_equivalent_seconds_total", "hold_off_seconds", "stale_proposals_total"]
BY_DEPTH = ["proposed_tokens_total", "accepted_tokens_total"]


@pytest.mark.parametrize(
    ("group", "names"),
    [
        (
            CoordinatorMetrics,
            [*ON_EVERY_SERVICE, *LATENCY, *BY_DEPTH, "draft_latency_seconds", "verify_latency_seconds"],
        ),
        (TargetMetrics, [*ON_ENGINES, *LATENCY, *BY_DEPTH, "verify_seconds", *PAYING]),
        (DraftMetrics, [*ON_ENGINES, "draft_seconds"]),
    ],
)
def test_each_service_exports_what_operators_need(group: Any, names: list[str]) -> None:
    registry = CollectorRegistry()
    group(registry)
    page = generate_latest(registry).decode()
    prefix = f"# TYPE specdec_{group.__name__.removesuffix('Metrics').lower()}_"
    assert [name for name in names if f"{prefix}{name} " not in page] == []


@pytest.mark.parametrize(("group", "service"), [(TargetMetrics, "target"), (DraftMetrics, "draft")])
def test_names_of_the_two_processes_of_a_replica_do_not_clash(group: type, service: str) -> None:
    registry = CollectorRegistry()
    group(registry)
    RelayMetrics(registry, service)
    BuildInfo(registry, service)


@pytest.mark.parametrize(
    ("group", "counter", "labels"),
    [
        (CoordinatorMetrics, "coordinator_requests_total", {"outcome": "UNAVAILABLE"}),
        (CoordinatorMetrics, "coordinator_draft_fallbacks_total", {"cause": "stream_broken"}),
        (CoordinatorMetrics, "coordinator_stream_reconnects_total", {"role": "target"}),
        (CoordinatorMetrics, "coordinator_store_errors_total", {"operation": "append"}),
        (TargetMetrics, "target_requests_total", {"outcome": "abort"}),
        (DraftMetrics, "draft_steps_total", {"kind": "prefill"}),
    ],
)
def test_what_has_not_happened_yet_is_zero_so_that_a_first_burst_is_a_rise(
    group: type, counter: str, labels: dict[str, str]
) -> None:
    registry = CollectorRegistry()
    group(registry)
    assert registry.get_sample_value(f"specdec_{counter}", labels) == 0


def test_own_registry_is_scraped_without_multiprocess_mode() -> None:
    registry = CollectorRegistry()
    assert scrape_registry(registry) is registry


def test_metrics_of_all_processes_are_merged(tmp_path: Path) -> None:
    code = """
import sys
from specdec.telemetry import *
from prometheus_client import CollectorRegistry
enable_multiprocess_metrics(sys.argv[1])
import subprocess
metrics = RelayMetrics(CollectorRegistry(), "target")
metrics.streams.set(2)
BuildInfo(CollectorRegistry(), "target")
child = (
    "from specdec.telemetry import *; from prometheus_client import CollectorRegistry;"
    "BuildInfo(CollectorRegistry(), 'target'); metrics = TargetMetrics(CollectorRegistry());"
    "metrics.steps.labels('verify').inc(3); metrics.kv_blocks_used.set(5)"
)
subprocess.run([sys.executable, "-c", child], check=True)
from prometheus_client import generate_latest
print(generate_latest(scrape_registry(CollectorRegistry())).decode())
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert 'specdec_target_steps_total{kind="verify"} 3.0' in lines
    assert "specdec_target_open_streams 2.0" in lines
    builds = [line for line in lines if line.startswith("specdec_build_info{")]
    assert len(builds) == 1
    assert builds[0].endswith(" 1.0")  # two processes, one build


def test_a_process_that_comes_back_goes_on_counting_and_its_gauges_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    child = """
import sys
from specdec.telemetry import *
from prometheus_client import CollectorRegistry
enable_multiprocess_metrics(sys.argv[1], sys.argv[2])
metrics = CoordinatorMetrics(CollectorRegistry())
metrics.requests.labels("OK").inc(3)
metrics.running.set(2)
metrics.replicas.labels("target", "ready").set(int(sys.argv[3]))
"""

    def run(process: str, num_replicas: int) -> None:
        subprocess.run([sys.executable, "-c", child, str(tmp_path), process, str(num_replicas)], check=True)

    def sample(name: str, **labels: str) -> float | None:
        page = scrape_registry(CollectorRegistry())
        return page.get_sample_value(f"specdec_coordinator_{name}", labels)

    (tmp_path / "counter_2.db").touch()  # as a process makes it, a moment before it fills it
    run("0", 2)
    run("1", 1)
    assert sample("requests_total", outcome="OK") == 6
    assert sample("requests_running") == 4
    assert sample("replicas", role="target", state="ready") == 2  # what two processes see are not more replicas

    forget_gauges(str(tmp_path), "0")
    assert sample("requests_total", outcome="OK") == 6
    assert sample("requests_running") == 2
    assert sample("replicas", role="target", state="ready") == 1

    run("0", 2)
    assert sample("requests_total", outcome="OK") == 9
    assert {path.name for path in tmp_path.glob("counter_*.db")} == {f"counter_{name}.db" for name in range(3)}
