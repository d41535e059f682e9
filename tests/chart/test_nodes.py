"""A target over several nodes: one LeaderWorkerSet in place of a Deployment."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from specdec.config import TargetSettings, load_settings
from tests.chart.api_server import api_server
from tests.chart.rendered import CHART, Document, Helm, component
from tests.support.for_each import for_each
from tests.support.servers.certificates import Authority, SecretVolume

SECURED: Document = {
    "target": {
        "nodes": 4,
        "replicas": 2,
        "gpu": {"count": 8},
        "updateStrategy": "surge",
        "updateStep": "50%",
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    },
    "tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "internal"}}},
    "networkPolicy": {"egress": {"enabled": True}},
    "serviceMonitor": {"enabled": True},
}
PLAIN: Document = {"target": {"nodes": 2, "gpu": {"count": 0}, "settings": {"tensor_parallel_size": 4}}}
POD_TEMPLATE: Document = {"type": "object"}
INT_OR_PERCENT: Document = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "%$"}]}
# The CRD's specification (kubernetes-sigs/lws, v1) without what is Kubernetes' own.
SPECIFICATION: Document = {
    "type": "object",
    "required": ["leaderWorkerTemplate"],
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer", "minimum": 0, "maximum": 1000000},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "networkConfig": {
            "type": "object",
            "required": ["subdomainPolicy"],
            "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
        },
        "rolloutStrategy": {
            "type": "object",
            "required": ["type"],
            "additionalProperties": False,
            "properties": {
                "type": {"enum": ["RollingUpdate"]},
                "rollingUpdateConfiguration": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "partition": {"type": "integer"},
                        "maxUnavailable": INT_OR_PERCENT,
                        "maxSurge": INT_OR_PERCENT,
                    },
                },
            },
        },
        "leaderWorkerTemplate": {
            "type": "object",
            "required": ["workerTemplate"],
            "additionalProperties": False,
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                "leaderTemplate": POD_TEMPLATE,
                "workerTemplate": POD_TEMPLATE,
            },
        },
    },
}

Rendered = Callable[[Document], list[Document]]


@pytest.fixture
def rendered(helm: Helm) -> Rendered:
    def render(values: Document) -> list[Document]:
        done = helm("template", "demo", str(CHART), "-n", "llm", "--kube-version", "1.31.0", values=values)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return render


def group_of(documents: list[Document]) -> Document:
    (found,) = [document for document in documents if document["kind"] == "LeaderWorkerSet"]
    return found


def templates(documents: list[Document]) -> tuple[Document, Document]:
    made = group_of(documents)["spec"]["leaderWorkerTemplate"]
    return made["leaderTemplate"], made["workerTemplate"]


@for_each("values", [SECURED, PLAIN])
def test_a_group_is_valid_by_the_schema_of_its_kind_and_of_pods(values: Document, rendered: Rendered) -> None:
    documents = rendered(values)
    group = group_of(documents)
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    jsonschema.validate(group["spec"], SPECIFICATION)
    for version in ("1.31", "1.37"):
        for template in templates(documents):
            pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "t"}, "template": template}
            kubernetes_validate.validate(pods, version, strict=True)
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    assert len(names) == len(documents)
    assert not [d for d in documents if d["kind"] == "Deployment" and component(d) == "target"]
    for document in documents:
        if document["kind"] in ("NetworkPolicy", "PodDisruptionBudget"):
            kubernetes_validate.validate(document, "1.31", strict=True)


def test_a_whole_group_restarts_and_is_updated_as_the_values_say(rendered: Rendered) -> None:
    spec = group_of(rendered(SECURED))["spec"]
    assert spec["replicas"] == 2
    assert spec["leaderWorkerTemplate"]["size"] == 4
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": "50%", "maxUnavailable": 0}
    in_place = group_of(rendered(PLAIN))["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert in_place == {"maxSurge": 0, "maxUnavailable": 1}


@for_each("values, ranks", [(SECURED, 32), (PLAIN, 4)])
def test_all_pods_run_one_command_that_the_service_accepts(
    values: Document, ranks: int, rendered: Rendered, tmp_path: Path
) -> None:
    authority = Authority("internal")
    folder = tmp_path / str(ranks)
    SecretVolume(folder, authority.issue("target"), authority.certificate)
    leader, follower = templates(rendered(values))
    size = values["target"]["nodes"]
    (led,), (followed,) = (template["spec"]["containers"] for template in (leader, follower))
    assert led == followed
    for number in range(size):
        # The controller's variables, which Kubernetes puts into arguments.
        variables = {
            "LWS_GROUP_SIZE": str(size),
            "LWS_WORKER_INDEX": str(number),
            "LWS_LEADER_ADDRESS": "demo-specdec-target-0.demo-specdec-target.llm",
        }
        args = [re.sub(r"=/etc/specdec/tls", f"={folder}", flag) for flag in led["args"]]
        for name, value in variables.items():
            args = [flag.replace(f"$({name})", value) for flag in args]
        settings = load_settings(TargetSettings, args, env_prefix=TargetSettings.env_prefix, prog="target")
        assert (settings.nnodes, settings.node_rank, settings.tensor_parallel_size) == (size, number, ranks)
        assert settings.master_addr == variables["LWS_LEADER_ADDRESS"]
        assert {"name": "nodes", "containerPort": settings.master_port} in led["ports"]
        assert settings.trusts_network


@for_each("values", [SECURED, PLAIN])
def test_only_leaders_are_found_and_called(values: Document, rendered: Rendered) -> None:
    documents = rendered(values)
    leader, follower = (template["metadata"]["labels"] for template in templates(documents))
    found = [d["spec"]["selector"] for d in documents if d["kind"] == "Service"]
    assert [selector for selector in found if selector.items() <= leader.items()]
    assert not [selector for selector in found if selector.items() <= follower.items()]
    (spread,) = templates(documents)[0]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= leader.items()
    assert "topologySpreadConstraints" not in templates(documents)[1]["spec"]
    guarded = [d["spec"]["selector"]["matchLabels"] for d in documents if d["kind"] == "PodDisruptionBudget"]
    for labels in (leader, follower):
        assert len([selector for selector in guarded if selector.items() <= labels.items()]) == 1


@for_each("values", [SECURED, PLAIN])
def test_ranks_reach_each_other_on_all_ports_and_others_reach_no_follower(values: Document, rendered: Rendered) -> None:
    documents = rendered(values)
    policies = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "NetworkPolicy"}
    for name in ("target", "target-node"):
        policy = policies[f"demo-specdec-{name}-ranks"]
        assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == name
        between, *rest = policy["ingress"]
        peers = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in between["from"]]
        assert peers == ["target", "target-node"]
        assert "ports" not in between
        assert rest == ([] if name == "target" else [{"ports": [{"port": 8081, "protocol": "TCP"}]}])
        if values is SECURED:
            assert policy["policyTypes"] == ["Ingress", "Egress"]
            assert policy["egress"][0] == {"to": between["from"]}
    if values is SECURED:
        ports = [
            port["port"]
            for rule in policies["demo-specdec-target-node-ranks"]["egress"]
            for port in rule.get("ports", ())
        ]
        assert ports == [53, 53, 443], "names, and the hub of the model"
        stored = {"source": "s3://models/a", "s3": {"endpoint": "https://minio.example:9000"}}
        policies = {
            d["metadata"]["name"]: d["spec"]
            for d in rendered({**SECURED, "target": {**SECURED["target"], "model": stored}})
            if d["kind"] == "NetworkPolicy"
        }
        hub = policies["demo-specdec-target"]["egress"][1]
        assert [port["port"] for port in hub["ports"]] == [443, 9000]
        assert hub in policies["demo-specdec-target-node-ranks"]["egress"], "each pod downloads"


def test_autoscalers_scale_groups_and_certificates_are_for_both_sides(rendered: Rendered) -> None:
    scaling = {"enabled": True, "prometheusAddress": "http://prometheus:9090"}
    documents = rendered({**SECURED, "target": {**SECURED["target"], "autoscaling": scaling}})
    (scaled,) = [d for d in documents if d["kind"] == "ScaledObject"]
    group = group_of(documents)
    assert scaled["spec"]["scaleTargetRef"] == {
        "apiVersion": group["apiVersion"],
        "kind": group["kind"],
        "name": group["metadata"]["name"],
    }
    assert "replicas" not in group["spec"]
    usages = {d["metadata"]["name"]: d["spec"]["usages"] for d in documents if d["kind"] == "Certificate"}
    assert "client auth" in usages["demo-specdec-target"]


@for_each(
    "values, named",
    [
        ({"target": {"nodes": 0}}, "target.nodes"),
        ({"target": {"nodes": 65}}, "target.nodes"),
        ({"draft": {"nodes": 2}}, "nodes"),
        ({"target": {"settings": {"nnodes": 2}}}, "nnodes"),
        ({"target": {"settings": {"node_rank": 1}}}, "node_rank"),
        (
            {
                **SECURED,
                "tls": {
                    "enabled": True,
                    "mutual": False,
                    "existingSecrets": dict.fromkeys(("coordinator", "gateway", "target", "draft"), "s"),
                },
            },
            "tls.mutual is needed",
        ),
        (
            {
                "target": {"nodes": 2},
                "networkPolicy": {"enabled": False},
                "gateway": {"settings": {"allow_unauthenticated": True}},
            },
            "target.settings.allow_unauthenticated is needed",
        ),
        ({"target": {"nodes": 2, "cache": {"type": "claim"}}}, "target.cache.accessModes needs ReadWriteMany"),
        ({"target": {"nodes": 2}, "gpuClaim": {"enabled": True}}, "gpuClaim.enabled"),
    ],
)
def test_values_that_cannot_work_are_refused_by_their_names(values: Document, named: str, helm: Helm) -> None:
    done = helm("template", "demo", str(CHART), "--kube-version", "1.33.0", values=values)
    assert done.returncode != 0
    assert named in done.stderr


def test_a_release_grows_from_a_deployment_to_groups_and_back(helm: Helm, tmp_path: Path) -> None:
    def apply(action: str, values: Document) -> None:
        done = helm(
            action, "demo", str(CHART), "-n", "llm", "--kubeconfig", str(cluster.kubeconfig),
            "--disable-openapi-validation", values=values,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    with api_server(tmp_path) as cluster:
        apply("install", {})
        assert cluster.named("Deployment", "demo-specdec-target")
        apply("upgrade", PLAIN)
        assert cluster.named("LeaderWorkerSet", "demo-specdec-target")["spec"]["leaderWorkerTemplate"]["size"] == 2
        assert "deployments/demo-specdec-target" not in cluster.workload
        apply("upgrade", {**PLAIN, "target": {**PLAIN["target"], "replicas": 3}})
        assert cluster.named("LeaderWorkerSet", "demo-specdec-target")["spec"]["replicas"] == 3
        apply("upgrade", {"target": {"nodes": 1}})
        assert cluster.named("Deployment", "demo-specdec-target")
        assert not [name for name in cluster.workload if name.startswith("leaderworkersets/")]
        assert "poddisruptionbudgets/demo-specdec-target-node" not in cluster.workload
