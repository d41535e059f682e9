"""The gateway in the chart: how it is reached from outside, who may reach it, and what it is told of TLS."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import yaml

from tests.chart.rendered import CHART, Document, Helm, Render, component, containers


def _rendered(helm: Helm, values: Document) -> list[Document]:
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def _service(documents: list[Document]) -> Document:
    (service,) = [
        d
        for d in documents
        if d["kind"] == "Service" and component(d) == "gateway" and d["spec"].get("clusterIP") != "None"
    ]
    return service


def _flags(documents: list[Document]) -> dict[str, str]:
    (container,) = [container for role, _, container in containers(documents) if role == "gateway"]
    return {flag.partition("=")[0]: flag.partition("=")[2] for flag in container["args"]}


@pytest.mark.parametrize("case", ["production", "everything", "behind-an-ingress"])
def test_an_ingress_leads_every_host_to_a_port_of_the_service(case: str, render: Render) -> None:
    documents = render(case)
    (ingress,) = [d for d in documents if d["kind"] == "Ingress"]
    service = _service(documents)
    hosts = [rule.get("host") for rule in ingress["spec"]["rules"]]
    for tls in ingress["spec"].get("tls", []):
        assert tls["hosts"] == hosts
    for rule in ingress["spec"]["rules"]:
        (path,) = rule["http"]["paths"]
        backend = path["backend"]["service"]
        assert backend["name"] == service["metadata"]["name"]
        assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize("case", ["everything", "behind-an-ingress"])
def test_a_route_leads_from_the_named_gateways_to_a_port_of_the_service(case: str, render: Render) -> None:
    documents = render(case)
    (route,) = [d for d in documents if d["kind"] == "HTTPRoute"]
    service = _service(documents)
    assert [parent["name"] for parent in route["spec"]["parentRefs"]] == ["public"]
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"] in {port["port"] for port in service["spec"]["ports"]}
    assert rule.get("timeouts", {}) == ({"request": "0s"} if case == "everything" else {})


def test_a_share_of_another_releases_model_reaches_the_gateway(render: Render) -> None:
    blue, green = _flags(render("everything"))["--models"].split(",")
    assert blue.endswith(":50051") and green == "org/coder=10.0.0.7:50061@10"


def test_nothing_of_the_gateway_is_there_without_it(render: Render) -> None:
    assert "gateway" not in {component(d) for d in render("without-gateways")}


def test_neither_ingress_nor_route_is_made_unless_asked_for(render: Render) -> None:
    assert not {"Ingress", "HTTPRoute"} & {d["kind"] for d in render("defaults")}


def test_metrics_are_no_business_of_clients_unless_asked_for(render: Render) -> None:
    assert "--no-public-metrics" in _flags(render("defaults"))
    assert "--public-metrics" in _flags(render("everything"))
    ports = {port["name"] for port in _service(render("defaults"))["spec"]["ports"]}
    assert ports == {"http"}


@pytest.mark.parametrize(
    ("tls", "serves", "demands"),
    [
        ({"enabled": False}, False, False),
        ({"enabled": True}, True, False),
        ({"enabled": True, "https": False}, False, False),
        ({"enabled": True, "verifyClients": True}, True, False),
        ({"enabled": True, "https": False, "verifyClients": True}, False, False),
        ({"enabled": True, "verifyHttpClients": True}, True, True),
    ],
)
def test_https_certificates_of_clients_and_the_gateways_own_are_told_apart(
    tls: dict[str, Any], serves: bool, demands: bool, helm: Helm
) -> None:
    issued = {"certManager": {"enabled": True, "issuerRef": {"name": "i"}}}
    documents = _rendered(helm, {"tls": {**tls, **issued}, "serviceMonitor": {"enabled": True}})
    flags = _flags(documents)
    assert ("--tls-dir" in flags) == serves
    assert ("--tls-verify-clients" in flags) == demands
    assert ("--coordinator-tls-dir" in flags) == tls["enabled"]
    protocol = {port["appProtocol"] for port in _service(documents)["spec"]["ports"]}
    assert protocol == {"https" if serves else "http"}
    (pod,) = [d for d in documents if d["kind"] == "Pod" and d["metadata"]["name"].endswith("-complete")]
    assert pod["spec"]["containers"][0]["args"][1].startswith("https://" if serves else "http://")
    for certificate in (d for d in documents if d["kind"] == "Certificate" and component(d) == "gateway"):
        assert {"server auth", "client auth"} <= set(certificate["spec"]["usages"])


def test_policies_name_who_may_call_gateways_and_let_them_call_coordinators(helm: Helm) -> None:
    ingress = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}
    apps = {"podSelector": {"matchLabels": {"app": "mine"}}}
    documents = _rendered(helm, {"networkPolicy": {"httpClients": [ingress], "clients": [apps]}})
    policies = {component(d): d["spec"] for d in documents if d["kind"] == "NetworkPolicy"}
    *_, callers = policies["gateway"]["ingress"]
    own = "app.kubernetes.io/component"
    assert callers["ports"] == [{"port": 8000, "protocol": "TCP"}]
    assert callers["from"][0] == ingress and apps not in callers["from"]
    assert [peer["podSelector"]["matchLabels"][own] for peer in callers["from"][1:]] == ["test"]
    *_, callers = policies["coordinator"]["ingress"]
    assert callers["from"][0] == apps
    assert [peer["podSelector"]["matchLabels"][own] for peer in callers["from"][1:]] == ["gateway", "test"]


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (401, 1)])
def test_the_test_pod_prints_what_the_gateway_answers(
    status: int, exit_code: int, render: Render, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bytes, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            asked.append((self.path, body, self.headers["authorization"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b'{"choices": [{"text": "there was"}]}' if status == 200 else b'{"error": "no key"}')

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    (pod,) = [d for d in render("defaults") if d["metadata"]["name"].endswith("-complete")]
    (container,) = pod["spec"]["containers"]
    python, option = container["command"]
    assert (python, option) == ("python3", "-c")
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SPECDEC_API_KEY", "mine")
    script, url, *rest = container["args"]
    assert url == "http://demo-specdec-gateway:8000"
    here = f"http://127.0.0.1:{server.server_port}"
    done = subprocess.run([sys.executable, option, script, here, *rest], capture_output=True, text=True, check=False)
    server.shutdown()
    server.server_close()
    assert done.returncode == exit_code, done.stderr
    assert "there was" in done.stdout if status == 200 else "no key" in done.stderr
    ((path, body, key),) = asked
    assert path == "/v1/completions" and b"Once upon a time" in body and key == "Bearer mine"
