"""InferencePools: what their CRD says, which pods they have, and what the picker reads of them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from prometheus_client import CollectorRegistry

from specdec.telemetry import CoordinatorPickerMetrics, PickerMetrics
from tests.chart.rendered import CHART, Document, Helm, Render, containers
from tests.support.for_each import for_each

_PORT = {
    "type": "object",
    "required": ["number"],
    "additionalProperties": False,
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
}
# The facts of inference.networking.k8s.io/v1, without their prose (gateway-api-inference-extension 84436a96).
SPEC: Document = {
    "type": "object",
    "required": ["selector", "targetPorts"],
    "additionalProperties": False,
    "properties": {
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "additionalProperties": False,
            "properties": {
                "matchLabels": {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": 64,
                    "additionalProperties": {"type": "string", "maxLength": 63},
                }
            },
        },
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": _PORT},
        "endpointPickerRef": {
            "type": "object",
            "required": ["name", "port"],  # The port: because its kind is Service.
            "additionalProperties": False,
            "properties": {
                "group": {"type": "string"},
                "kind": {"const": "Service"},
                "name": {"type": "string", "minLength": 1, "maxLength": 253},
                "port": _PORT,
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}
PICKER = ("vllm:num_requests_waiting", "vllm:num_requests_running")
OF_COORDINATORS = (*PICKER, "vllm:kv_cache_usage_perc", "vllm:cache_config_info")


def pool_of(documents: list[Document]) -> Document:
    (pool,) = [d for d in documents if d["kind"] == "InferencePool"]
    return pool


@pytest.mark.parametrize(
    ("case", "role", "protocol"),
    [("scaled-to-zero", "gateway", None), ("held-by-another-release", "coordinator", "kubernetes.io/h2c")],
)
def test_a_pool_has_the_pods_of_one_role_at_a_port_that_they_serve(
    case: str, role: str, protocol: str | None, render: Render
) -> None:
    documents = render(case)
    pool = pool_of(documents)
    # CRDs before 1.4 have no such field, and HTTP/1.1 is what they mean.
    assert (pool["apiVersion"], pool["spec"].get("appProtocol")) == ("inference.networking.k8s.io/v1", protocol)
    jsonschema.validate(pool["spec"], SPEC)
    chosen = pool["spec"]["selector"]["matchLabels"]
    selected = [
        d["metadata"]["name"]
        for d in documents
        if d["kind"] == "Deployment" and chosen.items() <= d["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert selected == [f"demo-specdec-{role}"]
    (container,) = [container for name, _, container in containers(documents) if name == role]
    assert ("--picker-metrics" in container["args"]) == (role == "coordinator")
    (port,) = pool["spec"]["targetPorts"]
    assert port["number"] in {each["containerPort"] for each in container["ports"]}


def test_a_route_leads_to_the_pool_and_the_picker_may_read_metrics_at_its_port(render: Render) -> None:
    documents = render("scaled-to-zero")
    (route,) = [d for d in documents if d["kind"] == "HTTPRoute"]
    ((backend,),) = [rule["backendRefs"] for rule in route["spec"]["rules"]]
    pool = pool_of(documents)
    assert backend == {
        "group": pool["apiVersion"].partition("/")[0], "kind": "InferencePool", "name": pool["metadata"]["name"]
    }  # fmt: skip
    (container,) = [container for name, _, container in containers(documents) if name == "gateway"]
    assert "--public-metrics" in container["args"]


def test_members_export_what_the_reference_picker_reads() -> None:
    gauges = {
        kind: {doc.name for doc in kind(CollectorRegistry()).docs if doc.type == "gauge"}
        for kind in (CoordinatorPickerMetrics, PickerMetrics)
    }
    assert gauges == {CoordinatorPickerMetrics: set(OF_COORDINATORS), PickerMetrics: set(PICKER)}


@for_each(
    "values, named",
    [
        ({"inferencePool": {"endpointPicker": {}}}, "inferencePool.endpointPicker.name is needed"),
        ({"gateway": {"enabled": False}}, "gateway.enabled is needed: inferencePool.members is gateway"),
        ({"networkPolicy": {}}, "networkPolicy.httpClients is needed"),
        ({"inferencePool": {"members": "coordinator"}, "networkPolicy": {}}, "networkPolicy.clients is needed"),
        ({"inferencePool": {"members": "target"}}, "inferencePool.members"),
        ({"inferencePool": {"endpointPicker": {"failureMode": "Open"}}}, "inferencePool.endpointPicker.failureMode"),
        (
            {"tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "i"}}}},
            "set tls.https to false",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(values: Any, named: str, helm: Helm) -> None:
    pool = {"enabled": True, "endpointPicker": {"name": "picker"}, **values.get("inferencePool", {})}
    anyone = {"httpClients": [{"podSelector": {}}], "clients": [{"podSelector": {}}]}
    values = {"networkPolicy": anyone, **values, "inferencePool": pool}
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=values)
    assert done.returncode != 0
    assert named in done.stderr
