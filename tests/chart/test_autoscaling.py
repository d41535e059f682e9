"""What the autoscalers of the GPU tiers decide, by Prometheus' own evaluation of their queries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.rendered import CHART, Document, Helm, Render

LABELS = 'namespace="llm",service="llm-target-headless"'
METRICS = ("sessions_running", "queue_length", "kv_blocks_used", "kv_blocks")


def _scaler(render: Render, role: str, case: str = "everything") -> Document:
    (scaler,) = [d for d in render(case) if d["kind"] == "ScaledObject" and d["metadata"]["name"].endswith(f"-{role}")]
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


def test_requests_that_wait_at_coordinators_are_load_of_the_targets_but_not_of_drafts(
    render: Render, tmp_path: Path
) -> None:
    waiting = {"series": 'specdec_coordinator_queue_length{namespace="llm",service="llm-coordinator-headless"}'}
    running = [{"series": f"specdec_target_{name}{{{LABELS}}}", "values": "30"} for name in METRICS[:2]]
    _held(_triggers(render)[0]["query"], [*running, {**waiting, "values": "70"}], [130.0], "0m", tmp_path)
    assert "coordinator_queue_length" not in _triggers(render, "draft")[1]["query"]


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


@pytest.mark.parametrize(("running", "has_draft", "fires"), [(0, False, False), (3, False, True), (3, True, False)])
def test_drafts_that_ended_for_want_of_requests_are_missed_only_by_requests_that_have_waited_for_a_start(
    running: int, has_draft: bool, fires: bool, helm: Helm, tmp_path: Path
) -> None:
    autoscaling = {"enabled": True, "minReplicas": 0, "prometheusAddress": "http://prometheus:9090"}
    values = {"draft": {"autoscaling": autoscaling, "startupSeconds": 480}, "prometheusRule": {"enabled": True}}
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=values)
    documents = [d for d in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if d and d["kind"] == "PrometheusRule"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(documents[0]["spec"]))
    replicas = 'specdec_coordinator_replicas{instance="c",role="draft",state="ready"}'
    series = [
        {"series": replicas, "values": "1 0x60 " + ("1x40" if has_draft else "0x40")},
        {"series": 'specdec_coordinator_requests_running{instance="c"}', "values": f"1 0x58 {running}x40"},
    ]
    alert = {"exp_labels": {"severity": "ticket", "instance": "c", "role": "draft", "state": "ready"}}
    alert["exp_annotations"] = {
        "summary": "Coordinator c has no ready draft",
        "description": "Coordinator c has no ready draft. "
        "Plain decoding answers requests with the same tokens, more slowly.",
        "runbook_url": "docs/operations.md#specdecdrafttierdown",
    }
    checks = [
        {"eval_time": at, "alertname": "SpecdecDraftTierDown", "exp_alerts": [alert] if fires and at == "71m" else []}
        for at in ("50m", "67m", "71m")
    ]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": checks}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [test]}))
    checked = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


HELD = 'specdec_gateway_requests_held{namespace="llm",service="demo-specdec-gateway-headless",model="",pod="%d"}'
RUNNING = 'specdec_coordinator_requests_running{namespace="llm",service="demo-specdec-coordinator-headless"}'
ASLEEP = ("coordinator", "target", "draft")


@pytest.mark.parametrize(
    ("held", "running", "expected"),
    [
        ((0, 0), None, [0.0]),
        ((2, 1), None, [3.0]),
        ((2, 0), 5, [7.0]),
        ((0, 0), 4, [4.0]),
        # Gateways never sleep: that they are not scraped says nothing of load.
        ((), 4, []),
        ((), None, []),
    ],
)
def test_held_requests_start_a_model_and_running_ones_keep_it(
    held: tuple[int, ...], running: int | None, expected: list[float], render: Render, tmp_path: Path
) -> None:
    series = [{"series": HELD % pod, "values": str(number)} for pod, number in enumerate(held)]
    series += [] if running is None else [{"series": RUNNING, "values": str(running)}]
    # Those of other models start others.
    series.append({"series": (HELD % 0).replace('model=""', 'model="org/coder"'), "values": "9"})
    queries = {_scaler(render, role, "scaled-to-zero")["triggers"][0]["metadata"]["query"] for role in ASLEEP}
    (query,) = queries
    _held(query, series, expected, "0m", tmp_path)


def test_a_model_without_pods_is_no_outage_and_is_started_by_one_trigger_only(render: Render, tmp_path: Path) -> None:
    for role in ASLEEP:
        scaler = _scaler(render, role, "scaled-to-zero")
        assert (scaler["minReplicaCount"], scaler["cooldownPeriod"]) == (0, 600 if role == "draft" else 1800)
        assert scaler.get("fallback", {}).get("replicas", 0) == (0 if role == "draft" else 1)
        calls, *others = scaler["triggers"]
        assert calls["metadata"]["activationThreshold"] == "0"
        for trigger in others:
            if trigger["type"] == "prometheus":
                _held(trigger["metadata"]["query"], [], [0.0], "0m", tmp_path)


def test_gateways_of_another_release_may_hold_its_requests(render: Render) -> None:
    calls = _scaler(render, "target", "held-by-another-release")["triggers"][0]["metadata"]["query"]
    labels = 'namespace="front",service="front-specdec-gateway-headless",model="org/coder"'
    assert calls.startswith(f"sum(specdec_gateway_requests_held{{{labels}}}) + (")


@pytest.mark.parametrize("case", ["everything", "production", "scaled-to-zero", "held-by-another-release"])
def test_keda_takes_each_scaled_object(case: str, render: Render) -> None:
    """What KEDA's webhook checks beyond the CRD's schema."""
    documents = render(case)
    scalers = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "ScaledObject"}
    hpas = {d["metadata"]["name"] for d in documents if d["kind"] == "HorizontalPodAutoscaler"}
    assert not scalers.keys() & hpas, "two autoscalers of one Deployment"
    for scaler in scalers.values():
        assert max(1, scaler["minReplicaCount"]) <= scaler["maxReplicaCount"]
        assert "idleReplicaCount" not in scaler, "with minReplicaCount 0 there is no room below it"
        own = [trigger for trigger in scaler["triggers"] if trigger["type"] not in ("cpu", "memory")]
        if "fallback" in scaler:
            assert any(trigger["metricType"] == "AverageValue" for trigger in own)
        if scaler["minReplicaCount"] == 0:
            assert own, "CPU alone starts no first pod"
        for document in documents:
            if document["kind"] == "Deployment" and document["metadata"]["name"] == scaler["scaleTargetRef"]["name"]:
                assert "replicas" not in document["spec"]
