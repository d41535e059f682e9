"""Where a role's model and GPUs come from: claims, downloads, image volumes, dynamic resource allocation."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from specdec.commands.app import app
from tests.chart.rendered import CHART, CUSTOM_KINDS, Document, Helm, containers
from tests.support.for_each import for_each

CLAIM: Document = {"type": "claim", "sizeLimit": "40Gi", "storageClassName": "fast", "accessModes": ["ReadWriteMany"]}
FETCH: Document = {"source": "hf://org/name@v1.2", "fetch": {"enabled": True, "beforeUpgrade": True}}


def rendered(helm: Helm, values: Document, version: str = "1.34") -> list[Document]:
    done = helm("template", "demo", str(CHART), "--namespace", "llm", "--kube-version", f"{version}.0", values=values)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]
    for document in documents:
        if document["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(document, version, strict=True)
    return documents


def service(documents: list[Document], name: str) -> tuple[Document, Document]:
    """Pod and container of a role."""
    (found,) = [(pod, container) for role, pod, container in containers(documents) if role == name]
    return found


def volume(pod: Document, name: str) -> Document:
    (found,) = [each for each in pod["volumes"] if each["name"] == name]
    return found


def test_a_claim_is_made_kept_and_mounted(helm: Helm) -> None:
    documents = rendered(helm, {"target": {"cache": CLAIM, "replicas": 3}})
    (claim,) = [d for d in documents if d["kind"] == "PersistentVolumeClaim"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"], "storageClassName": "fast", "resources": {"requests": {"storage": "40Gi"}}
    }  # fmt: skip
    pod, _ = service(documents, "target")
    assert volume(pod, "cache")["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({}, {"emptyDir": {"sizeLimit": "50Gi"}}),
        ({"type": "claim", "existingClaim": "mine"}, {"persistentVolumeClaim": {"claimName": "mine"}}),
    ],
)
def test_other_caches_make_no_claim(cache: Document, expected: Document, helm: Helm) -> None:
    documents = rendered(helm, {"target": {"cache": cache}})
    assert not [d for d in documents if d["kind"] == "PersistentVolumeClaim"]
    pod, _ = service(documents, "target")
    assert volume(pod, "cache") == {"name": "cache", **expected}


def test_an_ephemeral_volume_is_each_pods_own(helm: Helm) -> None:
    pod, _ = service(rendered(helm, {"draft": {"replicas": 2, "cache": {"type": "ephemeral"}}}), "draft")
    template = volume(pod, "cache")["ephemeral"]["volumeClaimTemplate"]
    assert template["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}}


def test_a_download_runs_before_the_service_and_before_an_upgrade(helm: Helm) -> None:
    values = {"target": {"model": {**FETCH, "tokenSecret": {"name": "hub", "key": "token"}}, "cache": CLAIM}}
    documents = rendered(helm, values)
    pod, container = service(documents, "target")
    (fetch,) = pod["initContainers"]
    (job,) = [d for d in documents if d["kind"] == "Job" and d["metadata"]["name"].endswith("-target-fetch")]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
    (same,) = job["spec"]["template"]["spec"]["containers"]
    assert same == fetch and fetch["command"] == ["specdec", "fetch"]
    assert fetch["args"] == ["org/name", "--revision=v1.2", "--timeout-s=3600"]
    options = typer.main.get_command(app).get_command(None, "fetch").params  # type: ignore[attr-defined]
    known = {option for parameter in options for option in parameter.opts}
    assert {flag.partition("=")[0] for flag in fetch["args"][1:]} <= known
    # Where the service looks, with its token.
    told = {each["name"]: each for each in fetch["env"]}
    assert {each["name"]: each for each in container["env"]}.items() >= told.items()
    assert {"HF_HOME", "HF_TOKEN"} <= told.keys()
    mounted = {mount["name"] for mount in fetch["volumeMounts"]}
    job_pod = job["spec"]["template"]["spec"]
    assert mounted == {each["name"] for each in job_pod["volumes"]}
    assert volume(job_pod, "cache") == volume(pod, "cache")


def test_a_download_has_what_the_service_has_and_runs_where_its_claim_is(helm: Helm) -> None:
    own = {"name": "ca", "mountPath": "/ca"}
    target: Document = {
        "model": {**FETCH, "fetch": {**FETCH["fetch"]}},
        "cache": {"type": "claim"},
        "extraEnv": [{"name": "HF_HOME", "value": "/ca/hub"}, {"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "authorities"}}],
        # The second is on a volume that only the service's pod has.
        "extraVolumeMounts": [own, {"name": "tls", "mountPath": "/etc/other", "readOnly": True}],
    }
    target["model"]["fetch"] |= {"resources": {"limits": {"cpu": 1, "memory": "2Gi"}}}
    certificates = {"certManager": {"enabled": True, "issuerRef": {"name": "internal"}}}
    documents = rendered(helm, {"target": target, "tls": {"enabled": True, **certificates}})
    pod, container = service(documents, "target")
    (job,) = [d for d in documents if d["kind"] == "Job" and d["metadata"]["name"].endswith("-target-fetch")]
    for each in (pod["initContainers"][0], *job["spec"]["template"]["spec"]["containers"]):
        assert {mount["mountPath"] for mount in each["volumeMounts"]} == {"/tmp", "/var/cache/specdec", "/ca"}
        assert each["resources"]["limits"] == {"cpu": 1, "memory": "2Gi"}
        names = [variable["name"] for variable in each["env"]]
        assert len(names) == len(set(names))
        assert [variable for variable in container["env"] if variable["name"] in names] == each["env"]
    job_pod = job["spec"]["template"]["spec"]
    assert volume(job_pod, "ca") == volume(pod, "ca")
    assert job_pod["serviceAccountName"] == pod["serviceAccountName"] == "demo-specdec-target", "a store may know it"
    (wish,) = job_pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (deployment,) = [d for d in documents if d["kind"] == "Deployment" and d["metadata"]["name"].endswith("-target")]
    assert wish["podAffinityTerm"]["labelSelector"] == deployment["spec"]["selector"]


def test_a_stored_model_has_its_store_and_keys_in_the_service_and_its_download(helm: Helm) -> None:
    store = {"endpoint": "https://minio.example.com:9000", "region": "eu-1", "existingSecret": "keys"}
    target = {"model": {"source": "s3://models/org/qwen3@0123456789abcdef", "s3": store, "fetch": {"enabled": True}}}
    documents = rendered(helm, {"target": target, "networkPolicy": {"egress": {"enabled": True}}})
    pod, container = service(documents, "target")
    (fetch,) = pod["initContainers"]
    assert fetch["args"] == ["s3://models/org/qwen3", "--revision=0123456789abcdef", "--timeout-s=3600"]
    assert {"--model=s3://models/org/qwen3", "--revision=0123456789abcdef"} <= set(container["args"])
    for each in (fetch, container):
        told = {variable["name"]: variable.get("value") for variable in each["env"]}
        assert told["AWS_ENDPOINT_URL"] == store["endpoint"] and told["AWS_DEFAULT_REGION"] == "eu-1"
        keys = [v["valueFrom"]["secretKeyRef"] for v in each["env"] if "KEY" in v["name"] and "valueFrom" in v]
        assert [key["name"] for key in keys] == ["keys", "keys"] and not any(key["optional"] for key in keys)
    (policy,) = [d for d in documents if d["kind"] == "NetworkPolicy" and d["metadata"]["name"].endswith("-target")]
    assert {"port": 9000, "protocol": "TCP"} in [port for rule in policy["spec"]["egress"] for port in rule["ports"]]


def test_a_public_bucket_of_amazon_needs_nothing_more(helm: Helm) -> None:
    _, container = service(rendered(helm, {"draft": {"model": {"source": "s3://models/org/qwen3"}}}), "draft")
    assert "--model=s3://models/org/qwen3" in container["args"]
    assert not [variable for variable in container["env"] if variable["name"].startswith("AWS_")]


def _budgets(documents: list[Document]) -> dict[str, tuple[int, int]]:
    """Seconds of a service's start, and of a Deployment's progress."""
    found = {}
    for document in documents:
        if document["kind"] == "Deployment":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            probe = container["startupProbe"]
            seconds = probe["periodSeconds"] * probe["failureThreshold"]
            found[container["name"]] = (seconds, document["spec"]["progressDeadlineSeconds"])
    return found


def test_a_start_may_take_as_long_as_the_models_size_and_its_download_need(helm: Helm) -> None:
    plain = _budgets(rendered(helm, {}))
    sized = _budgets(rendered(helm, {"target": {"model": {"sizeGiB": 140, "readMiBPerSecond": 100}}}))
    # 140 GiB at half of 100 MiB/s.
    assert (plain["target"][0], sized["target"][0], sized["coordinator"][0]) == (1800, 2870, 2870)
    assert sized["draft"] == plain["draft"]
    fetched = _budgets(rendered(helm, {"target": {"model": FETCH, "cache": CLAIM}}))
    assert fetched["target"][0] == 1800
    assert fetched["target"][1] - plain["target"][1] == 3600
    assert fetched["coordinator"][0] == 1800 + 3600, "it waits for a target"


@pytest.mark.parametrize(
    ("source", "reference", "model"),
    [
        ("oci://ghcr.io/org/qwen3:8b", "ghcr.io/org/qwen3:8b", "/models"),
        ("oci://r:5000/m@sha256:" + "0" * 64 + "#weights/fp16", "r:5000/m@sha256:" + "0" * 64, "/models/weights/fp16"),
    ],
)
def test_an_image_may_be_the_models_volume(source: str, reference: str, model: str, helm: Helm) -> None:
    pod, container = service(rendered(helm, {"target": {"model": {"source": source}}}, "1.35"), "target")
    assert volume(pod, "model")["image"] == {"reference": reference, "pullPolicy": "IfNotPresent"}
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
    assert f"--model={model}" in container["args"]


@for_each(
    "source, claim, model",
    [
        ("pvc://models", "models", "/models"),
        ("pvc://models/", "models", "/models"),
        ("pvc://my.models-1/llama/8b", "my.models-1", "/models/llama/8b"),
    ],
)
def test_a_model_may_be_at_the_root_of_a_claim(source: str, claim: str, model: str, helm: Helm) -> None:
    pod, container = service(rendered(helm, {"target": {"model": {"source": source}}}), "target")
    assert volume(pod, "model")["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
    assert f"--model={model}" in container["args"]


@pytest.mark.parametrize(("version", "group"), [("1.33", "v1beta1"), ("1.34", "v1"), ("1.37", "v1")])
def test_target_and_draft_share_one_claim(version: str, group: str, helm: Helm) -> None:
    sharing = {"kind": "GpuConfig", "sharing": {"strategy": "MPS"}}
    shared = {"enabled": True, "selectors": ["device.capacity['memory'] > 0"], "parameters": sharing}
    documents = rendered(helm, {"gpuClaim": shared}, version)
    (claim,) = [d for d in documents if d["kind"] == "ResourceClaim"]
    assert claim["apiVersion"] == f"resource.k8s.io/{group}"
    (request,) = claim["spec"]["devices"]["requests"]
    wanted = request["exactly"] if group == "v1" else request
    assert (wanted["deviceClassName"], wanted["count"]) == ("gpu.nvidia.com", 1)
    assert claim["spec"]["devices"]["config"][0]["opaque"] == {"driver": "gpu.nvidia.com", "parameters": sharing}
    for role in ("target", "draft"):
        pod, container = service(documents, role)
        assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimName": claim["metadata"]["name"]}]
        assert container["resources"]["claims"] == [{"name": "gpu"}]
        assert not [name for name in container["resources"]["limits"] if "/" in name]
    pod, _ = service(documents, "coordinator")
    assert "resourceClaims" not in pod


def test_another_way_to_share_a_gpu_is_another_claim(helm: Helm) -> None:
    """Nothing of a claim can be changed, and an upgrade must go on."""

    def name(**changed: Any) -> str:
        documents = rendered(helm, {"gpuClaim": {"enabled": True, **changed}})
        (claim,) = [d for d in documents if d["kind"] == "ResourceClaim"]
        found: str = claim["metadata"]["name"]
        return found

    assert name() == name()
    assert len({name(), name(count=2), name(selectors=["true"]), name(parameters={"kind": "GpuConfig"})}) == 4


def test_a_role_has_claims_of_its_own_parts_of_gpus_and_devices_of_other_vendors(helm: Helm) -> None:
    claims = [{"name": "nic", "resourceClaimTemplateName": "rdma", "request": "port"}]
    target = {"resourceClaims": claims, "gpu": {"resource": ""}}
    draft = {"gpu": {"resource": "nvidia.com/mig-1g.10gb"}}
    documents = rendered(helm, {"target": target, "draft": draft})
    pod, container = service(documents, "target")
    assert pod["resourceClaims"] == [{"name": "nic", "resourceClaimTemplateName": "rdma"}]
    assert container["resources"]["claims"] == [{"name": "nic", "request": "port"}]
    assert not [name for name in container["resources"]["limits"] if "/" in name]
    _, container = service(documents, "draft")
    assert container["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == "1"


@for_each(
    "values, named",
    [
        ({"target": {"replicas": 2, "cache": {"type": "claim"}}}, "target.cache.accessModes needs ReadWriteMany"),
        ({"coordinator": {"cache": {"type": "claim"}}}, "coordinator.cache.accessModes needs ReadWriteMany"),
        ({"target": {"model": {"source": "oci://ghcr.io/m:1"}}}, "target.model.source oci:// needs Kubernetes 1.33"),
        ({"gpuClaim": {"enabled": True}}, "gpuClaim.enabled needs Kubernetes 1.32"),
        ({"target": {"model": {"source": "pvc://m", "fetch": {"enabled": True}}}}, "target.model.fetch.enabled"),
        ({"draft": {"model": {"fetch": {"beforeUpgrade": True}}}}, "draft.model.fetch.enabled is needed"),
        ({"draft": {"model": {"fetch": {"enabled": True, "beforeUpgrade": True}}}}, "draft.cache.existingClaim or"),
        ({"target": {"cache": {"type": "hostPath"}}}, "target.cache.type"),
        ({"target": {"cache": {"accessModes": ["ReadOnlyMany"]}}}, "target.cache.accessModes"),
        ({"target": {"resourceClaims": [{"name": "gpu"}]}}, "target.resourceClaims.0"),
        ({"target": {"model": {"readMiBPerSecond": 0}}}, "target.model.readMiBPerSecond"),
        ({"target": {"autoscaling": {"minReplicas": 0}}}, "target.autoscaling.minReplicas"),
        ({"coordinator": {"autoscaling": {"minReplicas": 0}}}, "gateway.settings.hold_s or heldBy.service is needed"),
        (
            {
                "gateway": {"settings": {"hold_s": 9}},
                "coordinator": {"autoscaling": {"enabled": True, "minReplicas": 0}},
            },
            "coordinator.autoscaling.prometheusAddress is needed",
        ),
        (
            {
                "gateway": {"settings": {"hold_s": 9}},
                "coordinator": {"autoscaling": {"enabled": True, "minReplicas": 0, "prometheusAddress": "http://p"}},
                "upgradeCheck": {"enabled": True},
            },
            "upgradeCheck.enabled asks a coordinator",
        ),
        ({"target": {"model": {"source": "s3://models"}}, "draft": {"model": {"source": "s3://M/x"}}}, "draft.model"),
        ({"target": {"model": {"source": "s3://models/x@main"}}}, "target.model.source"),
        ({"coordinator": {"grpcRoute": {"enabled": True}}}, "coordinator.grpcRoute.parentRefs is needed"),
        ({"upgradeCheck": {"enabled": True}, "apiKeys": {"existingSecret": "k"}}, "test.apiKeySecret is needed"),
        ({"commonLabels": {"helm.sh/chart": "mine"}}, "commonLabels"),
        ({"resumeSecret": {"value": "short"}}, "resumeSecret.value"),
        ({"target": {"initContainers": [{"name": "no-image"}]}}, "target.initContainers.0"),
        ({"target": {"extraEnvFrom": [{"secret": {}}]}}, "target.extraEnvFrom.0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(values: Any, named: str, helm: Helm) -> None:
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=values)
    assert done.returncode != 0
    assert named in done.stderr
