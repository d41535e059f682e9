"""Installation and upgrades by the real helm, as an API server sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart.api_server import Cluster, api_server
from tests.chart.rendered import CHART, Document, Helm

REDIS: Document = {"redis": {"mode": "bundled"}}
FIXED: Document = {**REDIS, "coordinator": {"replicas": 4}}
AUTOSCALED: Document = {**REDIS, "coordinator": {"replicas": 4, "autoscaling": {"enabled": True}}}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with api_server(tmp_path) as cluster:
        yield cluster


def _do(helm: Helm, action: str, cluster: Cluster, values: Document) -> None:
    done = helm(
        action, "demo", str(CHART), "--namespace", "llm", "--kubeconfig", str(cluster.kubeconfig),
        "--disable-openapi-validation", values=values,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_upgrade_without_a_change_changes_nothing(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, FIXED)
    kinds = {path.split("/")[-2] for path in cluster.objects}
    assert {"secrets", "deployments", "services", "networkpolicies", "poddisruptionbudgets"} <= kinds
    # Secrets that the chart has made stay as they are.
    _do(helm, "upgrade", cluster, FIXED)
    assert cluster.patches == []


def test_a_secret_that_is_gone_is_made_again(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, FIXED)
    secret = cluster.named("Secret", "demo-specdec-redis")
    password = secret["data"].pop("redis-password")
    _do(helm, "upgrade", cluster, FIXED)
    ((name, patch),) = cluster.patches
    assert name == "secrets/demo-specdec-redis"
    assert patch["data"]["redis-password"] not in (None, password)


def test_what_an_autoscaler_has_scaled_stays_over_upgrades_and_rollbacks(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, AUTOSCALED)
    assert cluster.named("HorizontalPodAutoscaler", "demo-specdec-coordinator")
    for pods, settings in ((8, {"max_running": 9}), (12, {"max_running": 10})):
        cluster.named("Deployment", "demo-specdec-coordinator")["spec"]["replicas"] = pods
        coordinator: Document = {**AUTOSCALED["coordinator"], "settings": settings}
        _do(helm, "upgrade", cluster, {**AUTOSCALED, "coordinator": coordinator})
        assert cluster.named("Deployment", "demo-specdec-coordinator")["spec"]["replicas"] == pods
    for revision in ("2", "1"):
        done = helm("rollback", "demo", revision, "--namespace", "llm", "--kubeconfig", str(cluster.kubeconfig))
        assert done.returncode == 0, done.stderr
        deployment = cluster.named("Deployment", "demo-specdec-coordinator")
        assert deployment["spec"]["replicas"] == 12
    flags = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not [flag for flag in flags if flag.startswith("--max-running")]
    assert cluster.named("Deployment", "demo-specdec-target")["spec"]["replicas"] == 1


def test_no_look_up_of_a_live_object_decides_a_number_of_pods(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, FIXED)
    _do(helm, "upgrade", cluster, AUTOSCALED)
    ((name, patch),) = cluster.patches
    assert (name, patch["spec"]["replicas"]) == ("deployments/demo-specdec-coordinator", None)


def test_a_changed_setting_rolls_only_the_role_that_has_it(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, FIXED)
    _do(helm, "upgrade", cluster, {**FIXED, "draft": {"settings": {"max_ahead_tokens": 12}}})
    ((name, patch),) = cluster.patches
    assert name == "deployments/demo-specdec-draft"
    assert patch["spec"].keys() <= {"template", "$setElementOrder/containers"}
