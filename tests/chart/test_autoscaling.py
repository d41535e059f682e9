"""What the autoscalers of the GPU tiers decide, by Prometheus' own evaluation of their queries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.rendered import Document, Render

LABELS = 'namespace="llm",service="llm-target-headless"'
METRICS = ("sessions_running", "queue_length", "kv_blocks_used", "kv_blocks")


def _scaler(render: Render, role: str) -> Document:
    (scaler,) = [
        d for d in render("everything") if d["kind"] == "ScaledObject" and d["metadata"]["name"] == f"llm-{role}"
    ]
    found: Document = scaler["spec"]
    return found


def _triggers(render: Render, role: str = "target") -> list[Document]:
    return [trigger["metadata"] for trigger in _scaler(render, role)["triggers"]]


def _evaluated(query: str, pods: list[tuple[int, int, int, int]], expected: list[float], folder: Path) -> None:
    """Holds the query against pods with these metrics; promtool says what it found instead."""
    series = [
        {"series": f'specdec_target_{metric}{{{LABELS},pod="{index}"}}', "values": str(value)}
        for index, pod in enumerate(pods)
        for metric, value in zip(METRICS, pod, strict=True)
    ]
    _held(query, series, expected, "0m", folder)


def _held(query: str, series: list[Document], expected: list[float], at: str, folder: Path) -> None:
    samples = [{"labels": "{}", "value": value} for value in expected]
    check = {"expr": query, "eval_time": at, "exp_samples": samples}
    path = folder / "test.yml"
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [check]}
    path.write_text(yaml.safe_dump({"tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("pods", "sessions", "kv_percent"),
    [
        ([(30, 4, 60, 80)], [34.0], [75.0]),
        ([(30, 4, 60, 80), (10, 0, 20, 80)], [44.0], [100.0]),
        # The second has been started because of the load of the first, and loads its model.
        ([(30, 4, 60, 80), (0, 0, 0, 0)], [34.0], [75.0]),
        ([(0, 0, 0, 0)], [0.0], []),
        # Nothing is scraped.
        ([], [], []),
    ],
)
def test_load_is_summed_over_the_replicas_that_have_loaded(
    pods: list[tuple[int, int, int, int]],
    sessions: list[float],
    kv_percent: list[float],
    render: Render,
    tmp_path: Path,
) -> None:
    first, second, _ = _triggers(render)
    _evaluated(first["query"], pods, sessions, tmp_path)
    _evaluated(second["query"], pods, kv_percent, tmp_path)


def test_no_data_is_not_taken_for_no_load(render: Render) -> None:
    # KEDA's default is to take an empty result for 0, and an outage of Prometheus for an idle tier.
    assert {trigger["ignoreNullValues"] for role in ("target", "draft") for trigger in _triggers(render, role)} == {
        "false"
    }
    assert _scaler(render, "target")["fallback"] == {"failureThreshold": 4, "replicas": 2}
    assert "fallback" not in _scaler(render, "draft")


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        # Cumulative counts of buckets a minute: of 100 first tokens, 80 within 1 s and all within 2 s.
        ({"1": 80, "2": 100, "+Inf": 100}, [1.7499999999999996]),
        ({"1": 0, "2": 0, "+Inf": 0}, [0.0]),
        ({}, [0.0]),
    ],
)
def test_slow_first_tokens_add_targets_and_silence_adds_none(
    buckets: dict[str, int], expected: list[float], render: Render, tmp_path: Path
) -> None:
    name = f"specdec_target_time_to_first_token_seconds_bucket{{{LABELS},"
    series = [{"series": f'{name}le="{le}"}}', "values": f"0+{count}x9"} for le, count in buckets.items()]
    _held(_triggers(render)[2]["query"], series, expected, "5m", tmp_path)


def test_the_first_request_brings_the_first_draft_and_idle_drafts_end(render: Render, tmp_path: Path) -> None:
    scaler = _scaler(render, "draft")
    assert (scaler["minReplicaCount"], scaler["cooldownPeriod"]) == (0, 900)
    calls, *others = _triggers(render, "draft")
    assert calls["activationThreshold"] == "0"
    running = 'specdec_coordinator_requests_running{namespace="llm",service="llm-coordinator-headless"}'
    for count in (0, 3):
        _held(calls["query"], [{"series": running, "values": str(count)}], [float(count)], "0m", tmp_path)
    _held(calls["query"], [], [], "0m", tmp_path)
    for trigger in others:  # No pod, no series: that is no load, and no error.
        _held(trigger["query"], [], [0.0], "0m", tmp_path)
