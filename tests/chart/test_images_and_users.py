"""Images from any registry, and the users and groups of all pods."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from tests.chart.rendered import CHART, Document, Helm
from tests.support.for_each import for_each

# All kinds of pods: Deployments, a LeaderWorkerSet, Jobs, Redis, containers that download, and those of `helm test`.
VALUES: Document = {
    "redis": {"mode": "bundled"},
    "upgradeCheck": {"enabled": True},
    "target": {"nodes": 2},
    "draft": {"model": {"source": "hf://org/draft", "fetch": {"enabled": True}}},
}
NUM_PODS = 10
FIXED: Document = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
OURS: Document = {
    **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 10001),
    "fsGroupChangePolicy": "OnRootMismatch",
}
CHOSEN: Document = {"runAsUser": 1000680000, "runAsGroup": 0, "fsGroup": 0}
LABELLED: Document = {"supplementalGroups": [0, 7], "seLinuxOptions": {"level": "s0:c26,c5"}}
ROLE = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/instance": "demo"}


def rendered(helm: Helm, values: Document, *examples: str) -> list[Document]:
    files = [flag for name in examples for flag in ("--values", str(CHART / "examples" / name))]
    done = helm("template", "demo", str(CHART), "-n", "llm", "--kube-version", "1.31.0", *files, values=values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]


def pods(documents: list[Document]) -> Iterator[Document]:
    """Specifications of all pods, of whatever makes them."""
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "Pod":
            yield spec
        elif document["kind"] == "LeaderWorkerSet":
            template = spec["leaderWorkerTemplate"]
            yield from (template[name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
        elif document["kind"] in ("Deployment", "Job"):
            yield spec["template"]["spec"]


@for_each("registry", ["ghcr.io/org", "localhost:5000", "10.0.0.7:443/a/b_c", "Registry.Example.com/models"])
def test_all_images_come_from_one_registry_under_one_tag_unless_a_role_says_otherwise(
    registry: str, helm: Helm
) -> None:
    digest = f"sha256:{'0123456789abcdef' * 4}"
    images = {"coordinator": {"digest": digest}, "gateway": {"repository": "team/web", "tag": "1.10"}}
    given = {**VALUES, **{role: {"image": image} for role, image in images.items()}}
    documents = rendered(helm, {**given, "global": {"imageRegistry": registry, "imageTag": "2.0"}})
    found = {
        container["image"]
        for pod in pods(documents)
        for container in (*pod.get("initContainers", []), *pod["containers"])
    }
    ours = [f"specdec-coordinator@{digest}", "team/web:1.10", "specdec-engine-cuda:2.0"]
    assert found == {f"{registry}/{image}" for image in (*ours, "redis:7.2.11-bookworm")}


@for_each(
    "given, expected",
    [
        ({}, OURS),
        (dict.fromkeys(CHOSEN), {"fsGroupChangePolicy": "OnRootMismatch"}),
        (None, {}),
        (CHOSEN, OURS | CHOSEN),
        (LABELLED, OURS | LABELLED),
    ],
)
def test_users_and_groups_of_all_pods_are_those_of_the_values_or_the_clusters(
    given: Document | None, expected: Document, helm: Helm
) -> None:
    found = list(pods(rendered(helm, {**VALUES, "podSecurityContext": given})))
    assert len(found) == NUM_PODS
    for pod in found:
        assert pod["securityContext"] == FIXED | expected


def test_on_openshift_a_route_leads_to_gateways_which_the_router_reaches(helm: Helm) -> None:
    documents = rendered(helm, {}, "single-node-cpu.yaml", "openshift.yaml")
    assert not [
        pod for pod in pods(documents) if {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys()
    ]
    (route,) = [d["spec"] for d in documents if d["kind"] == "Route"]
    (service,) = [
        d["spec"] for d in documents if d["kind"] == "Service" and d["metadata"]["name"] == route["to"]["name"]
    ]
    assert ROLE.items() <= service["selector"].items()
    assert route["port"]["targetPort"] in {port["name"] for port in service["ports"]}
    router = {"namespaceSelector": {"matchLabels": {"policy-group.network.openshift.io/ingress": ""}}}
    admitted = [
        rule["from"]
        for d in documents
        if d["kind"] == "NetworkPolicy" and ROLE.items() <= d["spec"]["podSelector"]["matchLabels"].items()
        for rule in d["spec"]["ingress"]
        if "from" in rule
    ]
    assert [peers for peers in admitted if router in peers]
