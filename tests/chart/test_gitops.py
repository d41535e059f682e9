"""What tools need that render the chart themselves, and operators who add to it."""

from __future__ import annotations

import re
from collections.abc import Callable

import yaml

from tests.chart.rendered import CASES, CHART, SETTINGS, Document, Helm, Render, case_files, component, containers
from tests.support.for_each import for_each


@for_each("case", ["defaults", "production", "everything"])
def test_two_renders_are_equal(case: str, helm: Helm, render_text: Callable[..., str]) -> None:
    again = helm(
        "template", "demo", str(CHART), "--namespace", "llm", "--kube-version", "1.31.0", *case_files(CASES[case]),
        values=CASES[case].get("values", {}),
    )  # fmt: skip
    assert again.stdout == render_text(case)


def test_no_template_reads_the_cluster_the_clock_or_chance() -> None:
    for path in (CHART / "templates").rglob("*.*"):
        expressions = " ".join(re.findall(r"\{\{.*?\}\}", path.read_text(encoding="utf-8"), re.DOTALL))
        assert not re.search(
            r"\b(lookup|rand\w+|gen(CA|SignedCert|PrivateKey)\w*|uuidv4|now|shuffle)\b", expressions
        ), path


def _pods(documents: list[Document]) -> list[Document]:
    made = [d for d in documents if d["kind"] in ("Deployment", "Job")]
    return [d["spec"]["template"] for d in made] + [d for d in documents if d["kind"] == "Pod"]


def test_labels_scheduler_and_registries_secrets_reach_all_objects_and_pods(render: Render) -> None:
    documents = render("everything")
    own = [d for d in documents if "extra" not in d["metadata"]["name"] and not d["metadata"]["name"].endswith("-text")]
    pods = _pods(own)
    assert len(pods) == len(SETTINGS) + 3, "four services, Redis, the Jobs of secrets and of a download"
    for document in [*own, *pods]:
        assert document["metadata"]["labels"]["example.com/cost-centre"] == "inference"
    for pod in pods:
        assert pod["spec"]["schedulerName"] == "gang-scheduler"
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "platform"}]
    for document in own:
        selector = document.get("spec", {}).get("selector", {})
        assert "example.com/cost-centre" not in str(selector), "selectors are immutable"


def test_what_operators_add_is_there(render: Render) -> None:
    documents = render("everything")
    assert {"demo-extra", "llm-text"} <= {d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap"}
    pod, container = next((pod, each) for role, pod, each in containers(documents) if role == "target")
    assert container["envFrom"] == [{"secretRef": {"name": "target-environment"}}]
    (warm,) = pod["initContainers"]
    assert warm["command"] == ["sh", "-c", "true"]
    assert warm["securityContext"] == container["securityContext"]
    (route,) = [d for d in documents if d["kind"] == "GRPCRoute"]
    ((backend,),) = [rule["backendRefs"] for rule in route["spec"]["rules"]]
    services = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Service"}
    assert backend["port"] in {port["port"] for port in services[backend["name"]]["spec"]["ports"]}


def test_a_label_of_a_role_wins_over_the_common_one(helm: Helm) -> None:
    values = {"commonLabels": {"team": "a", "tier": "gpu"}, "target": {"podLabels": {"team": "b"}}}
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=values)
    documents = [d for d in yaml.safe_load_all(done.stdout) if d]
    labels = {component(d): d["spec"]["template"]["metadata"]["labels"] for d in documents if d["kind"] == "Deployment"}
    assert (labels["target"]["team"], labels["target"]["tier"], labels["draft"]["team"]) == ("b", "gpu", "a")
