"""What the autoscalers of the GPU tiers decide, by Prometheus' own evaluation of their queries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.rendered import Document, Render

LABELS = 'namespace="llm",service="llm-target-headless"'
METRICS = ("sessions_running", "queue_length", "kv_blocks_used", "kv_blocks")


def _triggers(render: Render) -> list[Document]:
    (scaler,) = [
        d for d in render("everything") if d["kind"] == "ScaledObject" and d["metadata"]["name"] == "llm-target"
    ]
    triggers: list[Document] = scaler["spec"]["triggers"]
    return [trigger["metadata"] for trigger in triggers]


def _evaluated(query: str, pods: list[tuple[int, int, int, int]], expected: list[float], folder: Path) -> None:
    """Holds the query against pods with these metrics; promtool says what it found instead."""
    series = [
        {"series": f'specdec_target_{metric}{{{LABELS},pod="{index}"}}', "values": str(value)}
        for index, pod in enumerate(pods)
        for metric, value in zip(METRICS, pod, strict=True)
    ]
    samples = [{"labels": "{}", "value": value} for value in expected]
    check = {"expr": query, "eval_time": "0m", "exp_samples": samples}
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump({"tests": [{"input_series": series, "promql_expr_test": [check]}]}))
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
    first, second = _triggers(render)
    _evaluated(first["query"], pods, sessions, tmp_path)
    _evaluated(second["query"], pods, kv_percent, tmp_path)


def test_no_data_is_not_taken_for_no_load(render: Render) -> None:
    # KEDA's default is to take an empty result for 0, and an outage of Prometheus for an idle tier.
    assert [trigger["ignoreNullValues"] for trigger in _triggers(render)] == ["false", "false"]
