"""Drafts without targets, beside a vLLM that verifies what they propose."""

from __future__ import annotations

from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from specdec.config import DraftSettings
from tests.chart.rendered import CHART, Document, Helm
from tests.support.for_each import for_each

EXAMPLE = CHART / "examples" / "drafts-for-vllm.yaml"
ALONE: dict[str, Any] = {"target": {"enabled": False}, "gateway": {"enabled": False}}


@pytest.fixture(scope="module")
def documents(helm: Helm) -> list[Document]:
    done = helm(
        "template", "demo", str(CHART), "--namespace", "llm", "--kube-version", "1.31.0", "--values", str(EXAMPLE)
    )
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]


def _named(documents: list[Document], kind: str, name: str) -> Document:
    (found,) = (d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name)
    return found


def test_only_drafts_and_vllm_are_made_and_kubernetes_takes_them(documents: list[Document]) -> None:
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    made = {f"{d['kind']}/{d['metadata']['name']}" for d in documents}
    assert made == {
        "NetworkPolicy/demo-specdec-draft", "PodDisruptionBudget/demo-specdec-draft",
        "ServiceAccount/demo-specdec-draft", "Service/demo-specdec-draft-headless",
        "Deployment/demo-specdec-draft", "Deployment/demo-specdec-vllm",
    }  # fmt: skip


def test_the_draft_waits_for_no_target_and_takes_its_flags(documents: list[Document]) -> None:
    (container,) = _named(documents, "Deployment", "demo-specdec-draft")["spec"]["template"]["spec"]["containers"]
    flags = [flag.removeprefix("--").partition("=")[0] for flag in container["args"]]
    assert not {"target", "link-targets"} & set(flags)
    known = {name.replace("_", "-") for name in DraftSettings.model_fields}
    assert {flag.removeprefix("no-") for flag in flags} <= known


def test_vllm_calls_the_drafts_and_their_policy_lets_it(documents: list[Document]) -> None:
    pod = _named(documents, "Deployment", "demo-specdec-vllm")["spec"]["template"]
    environment = {entry["name"]: entry["value"] for entry in pod["spec"]["containers"][0]["env"]}
    service = _named(documents, "Service", "demo-specdec-draft-headless")
    (port,) = (port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc")
    assert environment["SPECDEC_VLLM_DRAFTS"] == f"dns:///{service['metadata']['name']}:{port}"
    *_, calls = _named(documents, "NetworkPolicy", "demo-specdec-draft")["spec"]["ingress"]
    ((allowed,),) = (peer["podSelector"]["matchLabels"].items() for peer in calls["from"])
    assert allowed in pod["metadata"]["labels"].items()
    assert [allowed_port["port"] for allowed_port in calls["ports"]] == [port]


def test_the_notes_tell_the_drafts_address() -> None:
    with helm_python.Chart.load(str(CHART)) as chart:
        notes = chart.render(ALONE, name="demo", namespace="llm")["specdec/templates/NOTES.txt"]
    assert "SPECDEC_VLLM_DRAFTS=dns:///demo-specdec-draft-headless.llm.svc:50053" in notes
    assert "coordinator" not in notes


@for_each(
    "values, reason",
    [
        ({"gateway": {"enabled": True}}, "gateway.enabled must be false"),
        ({"draft": {"enabled": False}}, "draft.enabled must be true"),
        ({"redis": {"mode": "bundled"}}, "redis.mode must be none"),
        ({"upgradeCheck": {"enabled": True}}, "upgradeCheck.enabled must be false"),
        ({"coordinator": {"grpcRoute": {"enabled": True}}}, "coordinator.grpcRoute.enabled must be false"),
    ],
)
def test_what_needs_a_target_is_refused_without_one(values: Document, reason: str, helm: Helm) -> None:
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=ALONE | values)
    assert done.returncode != 0
    assert f"{reason}: target.enabled is false" in done.stderr


def test_no_alert_misses_the_coordinator_that_is_not_deployed(helm: Helm) -> None:
    def alerts(values: dict[str, Any]) -> set[str]:
        flags = ("--kube-version", "1.31.0")
        done = helm("template", "demo", str(CHART), *flags, values=values | {"prometheusRule": {"enabled": True}})
        rules = [d for d in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if d and d["kind"] == "PrometheusRule"]
        groups = [group for each in rules for group in each["spec"]["groups"]]
        return {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}

    network = {"networkPolicy": {"clients": [{"podSelector": {}}]}}
    assert alerts({}) - alerts(ALONE | network) == {"SpecdecCoordinatorDown"}
