"""The chart under other names, beside itself, inside another chart, and at another version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.chart.rendered import CHART, CUSTOM_KINDS, WITH_REDIS, Document, Helm, containers

# All that is made by default, and what has names of its own.
VALUES: Document = {
    "redis": {"mode": "bundled"},
    "tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "internal"}}},
    "serviceMonitor": {"enabled": True},
    "dashboards": {"enabled": True},
    "draft": {"autoscaling": {"enabled": True, "prometheusAddress": "http://prometheus:9090"}},
}
LONG = "team-inference-production-llama-70b-instruct-"


def _rendered(
    helm: Helm, release: str, values: Document, *, chart: Path = CHART, namespace: str = "llm"
) -> list[Document]:
    done = helm("template", release, str(chart), "--namespace", namespace, "--kube-version", "1.31.0", values=values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]


def _names(documents: list[Document]) -> set[tuple[str, str]]:
    return {(document["kind"], document["metadata"]["name"]) for document in documents}


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("demo", "demo-specdec"),
        ("specdec-blue", "specdec-blue"),
        ("70b", "specdec-70b"),
        ("llama-3.1", "llama-3-1-specdec"),
        ("1e3", "specdec-1e3"),
        ("true", "true-specdec"),
        (LONG + "a", "team-inference-production-llama-"),
        ("x" * 53, "x" * 31),
    ],
)
def test_every_name_of_a_release_that_helm_takes_makes_objects_that_kubernetes_takes(
    release: str, name: str, helm: Helm
) -> None:
    documents = _rendered(helm, release, VALUES)
    for document in documents:
        if document["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(document, "1.31", strict=True)
        assert document["metadata"]["name"].startswith(name)
        assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == release
        if document["kind"] != "ConfigMap":
            assert len(document["metadata"]["name"]) <= 63
        if document["kind"] == "Service":  # A DNS label that begins with a letter.
            assert document["metadata"]["name"].replace("-", "").isalnum()
            assert document["metadata"]["name"][0].isalpha()


def test_namespaces_that_look_like_numbers_stay_names(helm: Helm) -> None:
    assert {d["metadata"]["namespace"] for d in _rendered(helm, "demo", VALUES, namespace="123")} == {"123"}


@pytest.mark.parametrize(("one", "other"), [("blue", "green"), (LONG + "blue", LONG + "green")])
def test_two_releases_in_a_namespace_share_no_object_and_no_pod(one: str, other: str, helm: Helm) -> None:
    first, second = _rendered(helm, one, VALUES), _rendered(helm, other, VALUES)
    assert not _names(first) & _names(second)
    for document in first:
        if document["kind"] == "Service":
            assert document["spec"]["selector"]["app.kubernetes.io/instance"] == one


def test_releases_that_share_an_external_redis_or_an_authority_are_told_apart(helm: Helm) -> None:
    values = {**VALUES, "redis": {"mode": "external", "external": {"url": "rediss://redis.example.com/0"}}}
    told: dict[str, list[str]] = {}
    for release, namespace in (("demo", "llm"), ("demo", "n" * 63), ("other", "llm")):
        documents = _rendered(helm, release, values, namespace=namespace)
        for role, _, container in containers(documents):
            if role == "gateway":
                continue
            flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in container["args"])
            names = (
                "redis-key-prefix",
                "replica-tls-server-name" if role == "coordinator" else "tls-allowed-client-names",
            )
            for name in names:
                told.setdefault(f"{role} {name}", []).append(flags[name])
            assert len(flags["redis-key-prefix"]) <= 64
    assert len(told) == 2 * len(WITH_REDIS)
    assert all(len(set(values)) == 3 for values in told.values())


def test_another_version_of_the_chart_restarts_no_pod(helm: Helm, tmp_path: Path) -> None:
    other = tmp_path / "specdec"
    shutil.copytree(CHART, other)
    about = yaml.safe_load((other / "Chart.yaml").read_text())
    about["version"] = "0.1.1-rc.1+build.5"
    (other / "Chart.yaml").write_text(yaml.safe_dump(about))
    old, new = _rendered(helm, "demo", VALUES), _rendered(helm, "demo", VALUES, chart=other)
    assert [d["spec"]["template"] for d in old if d["kind"] == "Deployment"] == [
        d["spec"]["template"] for d in new if d["kind"] == "Deployment"
    ]
    assert {d["metadata"]["labels"]["helm.sh/chart"] for d in new} == {"specdec-0.1.1-rc.1_build.5"}
    for document in new:
        if document["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_chart_may_have_this_one_as_a_dependency_with_a_condition_and_globals(
    is_enabled: bool, helm: Helm, tmp_path: Path
) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    dependency = {"name": "specdec", "version": version, "condition": "specdec.enabled"}
    about = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(about))
    shutil.copytree(CHART, tmp_path / "charts/specdec")
    values = {"global": {"storageClass": "fast"}, "specdec": {"enabled": is_enabled, **VALUES}}
    documents = _rendered(helm, "platform", values, chart=tmp_path)
    assert _names(documents) == (_names(_rendered(helm, "platform", VALUES)) if is_enabled else set())


def test_a_variable_of_the_operator_replaces_that_of_the_chart(helm: Helm) -> None:
    documents = _rendered(helm, "demo", {"target": {"extraEnv": [{"name": "HF_HOME", "value": "/models/hub"}]}})
    environment = {
        role: [(variable["name"], variable.get("value")) for variable in container["env"]]
        for role, _, container in containers(documents)
    }
    assert [value for name, value in environment["target"] if name == "HF_HOME"] == ["/models/hub"]
    assert [value for name, value in environment["draft"] if name == "HF_HOME"] == ["/var/cache/specdec/huggingface"]


def test_the_test_pods_run_where_what_they_call_runs_and_are_kept_for_its_logs(helm: Helm) -> None:
    where = {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "cpu", "operator": "Exists"}]}
    for role, name in (("coordinator", "generate"), ("gateway", "complete")):
        (pod,) = [
            d
            for d in _rendered(helm, "demo", {role: where})
            if d["kind"] == "Pod" and d["metadata"]["name"].endswith(f"-{name}")
        ]
        assert {key: pod["spec"][key] for key in where} == where
        # helm 3 deletes what "succeeded" before it reads the logs that --logs asks for.
        assert "succeeded" not in json.dumps(pod["metadata"]["annotations"])
