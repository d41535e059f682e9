"""Installation and upgrades by the real helm, as an API server sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.chart.api_server import Cluster, api_server
from tests.chart.rendered import CHART, Document, Helm
from tests.support.releases import last_release

REDIS: Document = {"redis": {"mode": "bundled"}}
FIXED: Document = {**REDIS, "coordinator": {"replicas": 4}}
AUTOSCALED: Document = {**REDIS, "coordinator": {"replicas": 4, "autoscaling": {"enabled": True}}}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with api_server(tmp_path) as cluster:
        yield cluster


def _do(helm: Helm, action: str, cluster: Cluster, values: Document, *flags: str, chart: Path = CHART) -> None:
    done = helm(
        action, "demo", str(chart), "--namespace", "llm", "--kubeconfig", str(cluster.kubeconfig),
        "--disable-openapi-validation", *flags, values=values,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_upgrade_without_a_change_changes_nothing(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, FIXED)
    kinds = {path.split("/")[-2] for path in cluster.objects}
    assert {"secrets", "deployments", "services", "networkpolicies", "poddisruptionbudgets"} <= kinds
    # Secrets that the chart has made stay as they are.
    _do(helm, "upgrade", cluster, FIXED)
    assert cluster.patches == []


def generated(cluster: Cluster) -> Document:
    data: Document = cluster.named("Secret", "demo-specdec-generated")["data"]
    return data


def test_a_job_makes_each_secret_once_and_again_when_it_is_gone(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, FIXED)
    first = dict(generated(cluster))
    assert first.keys() == {"resume-secret", "redis-password"}
    assert len(set(first.values())) == 2 and min(map(len, first.values())) >= 48
    del generated(cluster)["redis-password"]
    _do(helm, "upgrade", cluster, FIXED)
    assert generated(cluster)["resume-secret"] == first["resume-secret"]
    assert generated(cluster)["redis-password"] not in (None, first["redis-password"])
    assert [name for name, _ in cluster.jobs.ran] == ["demo-specdec-secrets"] * 2
    assert not [name for name in cluster.workload if name.startswith(("jobs/", "roles/", "rolebindings/"))]


def test_no_job_runs_where_all_secrets_are_given(cluster: Cluster, helm: Helm) -> None:
    redis = {"mode": "bundled", "bundled": {"password": "a: {given} one"}}
    _do(helm, "install", cluster, {"redis": redis, "resumeSecret": {"value": "sixteen characters"}})
    assert cluster.jobs.ran == []
    assert cluster.named("Secret", "demo-specdec-redis")["data"] == {"redis-password": "YToge2dpdmVufSBvbmU="}
    assert cluster.named("Secret", "demo-specdec-resume")["data"] == {"resume-secret": "c2l4dGVlbiBjaGFyYWN0ZXJz"}


def test_a_job_that_may_not_read_secrets_fails_the_upgrade_and_says_why(cluster: Cluster, helm: Helm) -> None:
    _do(helm, "install", cluster, FIXED)
    cluster.jobs.is_forbidden = True
    done = helm("upgrade", "demo", str(CHART), "-n", "llm", "--kubeconfig", str(cluster.kubeconfig), values=FIXED)
    assert done.returncode == 1 and "pre-upgrade hooks failed: job failed" in done.stderr
    (said,) = cluster.jobs.ran[-1][1]
    assert said.startswith("secret demo-specdec-generated: HTTP Error 403") and said.count("\n") == 1


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


@pytest.mark.parametrize("values", [{}, None])
def test_an_upgrade_without_values_keeps_those_of_the_last_revision_until_they_are_reset(
    values: Document | None, cluster: Cluster, helm: Helm
) -> None:
    def upgrade(*flags: str) -> None:
        where = ["--namespace", "llm", "--kubeconfig", str(cluster.kubeconfig)]
        done = helm("upgrade", "demo", str(CHART), *where, *flags, values=values)
        assert done.returncode == 0, done.stderr

    _do(helm, "install", cluster, FIXED)
    before = dict(cluster.workload)
    upgrade()  # What helm does with every chart.
    assert cluster.patches == [] and cluster.workload == before
    upgrade("--reset-values")
    assert cluster.named("Deployment", "demo-specdec-coordinator")["spec"]["replicas"] == 1
    assert "deployments/demo-specdec-redis" not in cluster.workload


@pytest.mark.parametrize("is_whole", [False, True])
def test_values_that_were_given_to_the_last_chart_do_for_this_one(is_whole: bool, cluster: Cluster, helm: Helm) -> None:
    """What helm 3.14's --reset-then-reuse-values does; some operators give the whole of values.yaml, changed."""
    given = FIXED
    if is_whole:
        given = yaml.safe_load((last_release().chart / "values.yaml").read_text())
        given["coordinator"]["replicas"], given["redis"]["mode"] = 4, "bundled"
    _do(helm, "install", cluster, given, chart=last_release().chart)
    _do(helm, "upgrade", cluster, given, "--reset-values")
    assert cluster.named("Deployment", "demo-specdec-coordinator")["spec"]["replicas"] == 4
    upgraded = {
        name: d for name, d in cluster.workload.items() if name.partition("/")[0] in ("deployments", "services")
    }
    with_todays_defaults = helm("template", "demo", str(CHART), "-n", "llm", "--kube-version", "1.31.0", values=FIXED)
    rendered = [d for d in yaml.load_all(with_todays_defaults.stdout, Loader=yaml.CSafeLoader) if d]
    for document in rendered:
        if document["kind"] in ("Deployment", "Service"):
            found = upgraded.pop(f"{document['kind'].lower()}s/{document['metadata']['name']}")
            assert found["spec"].get("template") == document["spec"].get("template")
            assert found["spec"]["selector"] == document["spec"]["selector"]
    assert upgraded == {}


def test_a_release_of_the_last_chart_is_upgraded_with_the_values_that_it_has_and_rolled_back(
    cluster: Cluster, helm: Helm
) -> None:
    _do(helm, "install", cluster, FIXED, chart=last_release().chart)
    before = set(cluster.workload)
    old = {name: o["data"] for name, o in cluster.workload.items() if name.startswith("secrets/")}
    # A part of a block that the last chart had not.
    _do(helm, "upgrade", cluster, {"gateway": {"replicas": 3}}, "--reuse-values")
    # Streams go on with the tokens that they have, and Redis keeps its password.
    taken = old["secrets/demo-specdec-resume"] | old["secrets/demo-specdec-redis"]
    assert generated(cluster) == taken and len(taken) == 2
    assert cluster.named("Deployment", "demo-specdec-coordinator")["spec"]["replicas"] == 4
    gateway = cluster.named("Deployment", "demo-specdec-gateway")
    assert gateway["spec"]["replicas"] == 3
    assert gateway["spec"]["template"]["spec"]["containers"][0]["image"].startswith("specdec-gateway:")
    _do(helm, "upgrade", cluster, {"gateway": {"enabled": False}}, "--reuse-values")
    assert not [path for path in cluster.objects if path.endswith("-gateway")]
    done = helm("rollback", "demo", "1", "--namespace", "llm", "--kubeconfig", str(cluster.kubeconfig))
    assert done.returncode == 0, done.stderr
    assert cluster.workload.keys() - {"secrets/demo-specdec-generated"} == before
    assert {name: cluster.workload[name]["data"] for name in old} == old


def test_roles_may_share_a_service_account(cluster: Cluster, helm: Helm) -> None:
    account: Document = {"name": "models", "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}}
    shared = {role: {"serviceAccount": account} for role in ("target", "draft")}
    _do(helm, "install", cluster, shared)
    made = cluster.named("ServiceAccount", "models")["metadata"]
    assert account["annotations"].items() <= made["annotations"].items()
    for role in ("target", "draft"):
        deployment = cluster.named("Deployment", f"demo-specdec-{role}")
        assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == "models"


def test_an_older_helm_can_change_the_wait_before_a_pod_ends(cluster: Cluster, helm: Helm) -> None:
    """It knows pods as they were at its time, and patches no field that is newer."""
    for seconds in (5, 9):
        _do(helm, "upgrade", cluster, {"gateway": {"preStopSeconds": seconds}}, "--install")
        pod = cluster.named("Deployment", "demo-specdec-gateway")["spec"]["template"]["spec"]
        assert pod["containers"][0]["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", str(seconds)]}}
