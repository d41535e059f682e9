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


def test_switching_autoscaling_on_takes_no_pod_away(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, FIXED)
    deployment = cluster.named("Deployment", "demo-specdec-coordinator")
    assert deployment["spec"]["replicas"] == 4
    _do(helm, "upgrade", cluster, AUTOSCALED)
    assert cluster.named("HorizontalPodAutoscaler", "demo-specdec-coordinator")
    assert cluster.patches == []
    # It has scaled since.
    deployment["spec"]["replicas"] = 6
    _do(helm, "upgrade", cluster, AUTOSCALED)
    assert cluster.patches == []


def test_autoscaled_roles_are_installed_without_a_number_of_pods(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, AUTOSCALED)
    assert "replicas" not in cluster.named("Deployment", "demo-specdec-coordinator")["spec"]
    assert cluster.named("Deployment", "demo-specdec-target")["spec"]["replicas"] == 1


def test_a_changed_setting_rolls_only_the_role_that_has_it(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, FIXED)
    _do(helm, "upgrade", cluster, {**FIXED, "draft": {"settings": {"max_ahead_tokens": 12}}})
    ((name, patch),) = cluster.patches
    assert name == "deployments/demo-specdec-draft"
    assert patch["spec"].keys() <= {"template", "$setElementOrder/containers"}
