"""The Helm chart: what it renders is valid, safe, and names only what the services have."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
from prometheus_client import CollectorRegistry

from specdec.commands.app import app
from specdec.commands.connection import API_KEY_VARIABLE
from specdec.commands.up.service_process import MODULES
from specdec.config import CoordinatorSettings, load_settings
from specdec.coordinator.servicer import SERVICE_NAME
from specdec.telemetry import CoordinatorMetrics, DraftMetrics, TargetMetrics
from specdec.v1 import draft_pb2, target_pb2
from tests.chart.rendered import (
    CASES,
    CHART,
    CUSTOM_KINDS,
    SETTINGS,
    WITH_REDIS,
    Document,
    Helm,
    Render,
    case_files,
    component,
    containers,
)
from tests.support.for_each import for_each
from tests.support.servers.certificates import Authority, SecretVolume

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_CASES = ("defaults", "single-node-cpu", "two-gpus", "production", "everything")
KUBE_VERSIONS = ("1.27", pytest.param("1.31", marks=pytest.mark.smoke), "1.37")
GRPC_NAMES = {
    "coordinator": SERVICE_NAME,
    "target": target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
    "draft": draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
}
every_case = for_each("case", CASES)


def _flag(documents: list[Document], role: str, name: str) -> str:
    """What a service's flag is given."""
    (args,) = [container["args"] for each, _, container in containers(documents) if each == role]
    (value,) = [flag.partition("=")[2] for flag in args if flag.startswith(f"{name}=")]
    return str(value)


def _setting(flag: str, fields: set[str]) -> str:
    name = flag.removeprefix("--").partition("=")[0].replace("-", "_")
    return name.removeprefix("no_") if name not in fields else name


def test_lint_is_strict_and_clean(helm: Helm) -> None:
    """Of helm 3; helm 4's is run for each case (test_checkers.py)."""
    case = CASES["everything"]
    done = helm("lint", "--strict", str(CHART), *case_files(case), values=case["values"])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", KUBE_VERSIONS)
def test_objects_are_valid_on_every_supported_kubernetes(version: str, render: Render) -> None:
    valid = set()
    for case in CASES:
        for document in render(case, f"{version}.0"):
            text = json.dumps(document)
            if document["kind"] not in CUSTOM_KINDS and text not in valid:
                try:
                    kubernetes_validate.validate(document, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    pytest.fail(f"{case}: {document['kind']} {document['metadata']['name']}: {error.message}")
                valid.add(text)
    assert len(valid) > len(CASES)


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_renders_are_the_golden_ones(case: str, render_text: Callable[..., str]) -> None:
    # Rules and dashboards have a test of their own.
    rules = r"(?ms)^# Source: specdec/templates/(?:dashboards|prometheusrules)\.yaml\n.*?(^---\n|\Z)"
    text = re.sub(rules, "", render_text(case))
    path = GOLDEN / f"{case}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)
    golden = path.read_text()
    diff = "".join(difflib.unified_diff(golden.splitlines(True), text.splitlines(True), str(path), "rendered"))
    assert not diff, f"rerun with UPDATE_GOLDEN=1 if this is meant:\n{diff}"


@every_case
def test_commands_start_a_role_with_settings_it_has(case: str, render: Render) -> None:
    roles = set()
    for role, _, container in containers(render(case)):
        roles.add(role)
        fields = set(SETTINGS[role].model_fields)
        assert container["command"] == ["specdec", "serve", role]
        assert role in MODULES
        assert {_setting(flag, fields) for flag in container["args"]} <= fields
        names = [variable["name"] for variable in container["env"]]
        assert len(names) == len(set(names))
        for variable in container["env"]:
            if variable["name"] == "SPECDEC_HEALTH_ADDRESS":
                assert variable["value"] == f"{'http://' if role == 'gateway' else ''}127.0.0.1:8081"
            elif variable["name"].startswith("SPECDEC_"):
                prefix = SETTINGS[role].env_prefix
                assert variable["name"].startswith(prefix)
                assert variable["name"].removeprefix(prefix).lower() in fields
    assert roles == set(SETTINGS) - {{"without-drafts": "draft", "without-gateways": "gateway"}.get(case)}


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """The files of mounted secrets, here."""
    folder = tmp_path / "secrets"
    authority = Authority("internal")
    SecretVolume(folder, authority.issue("service"), authority.certificate)
    (folder / "api-keys.yaml").write_text("")
    return folder


@pytest.mark.smoke
@every_case
def test_the_services_accept_the_flags_as_rendered(case: str, render: Render, mounted: Path) -> None:
    secrets = {"REDIS_URL": "rediss+sentinel://a:26379,b:26379/main/0", "OTLP_HEADERS": "authorization=Bearer%20key"}
    for role, _, container in containers(render(case)):
        cls = SETTINGS[role]
        args = [re.sub(r"=/etc/specdec/[a-z-]+", f"={mounted}", flag) for flag in container["args"]]
        args = [flag.replace("$(POD_IP)", "10.1.2.3") for flag in args]
        with pytest.MonkeyPatch.context() as environment:
            for variable in container["env"]:
                if "secretKeyRef" in variable.get("valueFrom", {}):
                    name = variable["name"].removeprefix(cls.env_prefix)
                    environment.setenv(variable["name"], secrets.get(name, "a secret of a certain length"))
            settings = load_settings(cls, args, env_prefix=cls.env_prefix, prog=role)
        assert settings.health_port == 8081
        assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
            "http" if role == "gateway" else "grpc": settings.port,
            "metrics": settings.metrics_port,
            "health": settings.health_port,
        }


@every_case
def test_what_is_found_by_name_is_found_through_services_that_exist(case: str, render: Render) -> None:
    documents = render(case)
    ports = {
        f"{document['metadata']['name']}:{port['port']}"
        for document in documents
        if document["kind"] == "Service" and document["spec"].get("clusterIP") == "None"
        for port in document["spec"]["ports"]
    }
    args = next(container["args"] for role, _, container in containers(documents) if role == "coordinator")
    called = [flag.partition("=dns:///")[2] for flag in args if flag.startswith(("--targets=", "--drafts="))]
    assert len(called) == (1 if case == "without-drafts" else 2)
    assert set(called) <= ports
    for role, _, container in containers(documents):
        if role == "gateway":
            (named,) = [flag for flag in container["args"] if flag.startswith("--coordinators=dns:///")]
            assert named.partition("=dns:///")[2] in ports


@every_case
def test_probes_ask_for_the_service_that_the_role_serves(case: str, render: Render) -> None:
    for role, _, container in containers(render(case)):
        if role == "gateway":
            probes = [container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
            # Only readiness depends on coordinators: without one a restart would change nothing.
            assert [probe["path"] for probe in probes] == ["/version", "/health", "/version"]
            assert {probe["port"] for probe in probes} == {8081}
            continue
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"] == {"port": 8081, "service": GRPC_NAMES[role]}


@every_case
def test_a_pod_may_take_as_long_to_start_and_to_end_as_its_settings_say(case: str, render: Render) -> None:
    documents = render(case, "1.27.0")
    budgets, deadlines = {}, {}
    waiting: set[str] = set()
    for role, pod, container in containers(documents):
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"] if "=" in flag)
        pre_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        needed = pre_stop + float(flags["drain-s"]) + float(flags["stop-grace-s"])
        assert pod["terminationGracePeriodSeconds"] > needed
        startup = container["startupProbe"]
        budgets[role] = startup["failureThreshold"] * startup["periodSeconds"]
        deadlines[role] = pod["terminationGracePeriodSeconds"] + budgets[role]
        if "load-timeout-s" in flags:
            assert budgets[role] >= float(flags["load-timeout-s"])
        if role == "coordinator" or "target" in flags:
            waiting.add(role)
    # They are ready when they have a target, which may have begun to load with them.
    assert all(budgets[role] >= budgets["target"] for role in waiting)
    if "gateway" in deadlines:  # It is ready when a coordinator is.
        deadlines["gateway"] += budgets["coordinator"]
    for deployment in (d for d in documents if d["kind"] == "Deployment" and component(d) in SETTINGS):
        assert deployment["spec"]["progressDeadlineSeconds"] > deadlines[component(deployment)]


def test_an_update_goes_on_only_when_coordinators_have_found_the_new_replica(render: Render) -> None:
    longest_cache_of_names_s = 30  # Kubernetes' own server says 5 s; caches on nodes may keep what they have for 30 s.
    documents = render("defaults")
    for deployment in (d for d in documents if d["kind"] == "Deployment" and component(d) in ("target", "draft")):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        pre_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        found = CoordinatorSettings.model_fields["discovery_s"].default + longest_cache_of_names_s
        assert deployment["spec"]["minReadySeconds"] + pre_stop >= found


@every_case
def test_pods_are_restricted(case: str, render: Render) -> None:
    documents = render(case)
    pods = [document["spec"] for document in documents if document["kind"] == "Pod"]
    assert len(pods) == {"everything": 0, "without-gateways": 1}.get(case, 2)
    made = [d for d in documents if d["kind"] in ("Deployment", "Job")]
    pods += [document["spec"]["template"]["spec"] for document in made]
    # Only the Job that makes secrets calls the API server.
    trusted = [d["spec"]["template"]["spec"] for d in made if component(d) == "secrets"]
    for pod in pods:
        assert pod["automountServiceAccountToken"] is (pod in trusted)
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_pods_of_several_gpus_have_what_their_ranks_need(render: Render) -> None:
    ranks = {}
    for case in CASES:
        for role, pod, container in containers(render(case)):
            flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"] if "=" in flag)
            size = int(flags.get("tensor-parallel-size", 1))
            if size == 1:
                continue
            ranks[case, role] = size
            resources = container["resources"]
            assert resources["limits"]["nvidia.com/gpu"] == str(size)
            assert float(resources["requests"]["cpu"]) > size, "a core for each rank, and some for the servicer"
            assert ":" not in flags.get("device", "auto"), "ranks choose their GPUs"
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert ranks["production", "target"] == 4
    assert ranks["several-gpus", "target"] == 2


def test_what_is_autoscaled_has_no_fixed_replicas(render: Render) -> None:
    documents = render("everything")
    scaled = {
        d["spec"]["scaleTargetRef"]["name"]
        for d in documents
        if d["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")
    }
    deployments = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Deployment"}
    del deployments["llm-redis"]
    assert scaled == set(deployments)
    assert not any("replicas" in spec for spec in deployments.values())


def test_autoscalers_query_metrics_that_the_role_exports(render: Render) -> None:
    groups: dict[str, type[Any]] = {"target": TargetMetrics, "draft": DraftMetrics, "coordinator": CoordinatorMetrics}
    exported: dict[str, set[str]] = {}
    for role, group in groups.items():
        registry = CollectorRegistry()
        group(registry)
        exported[role] = {family.name for family in registry.collect()}
    for role in ("target", "draft"):
        scaler = next(
            d for d in render("everything") if d["kind"] == "ScaledObject" and d["metadata"]["name"] == f"llm-{role}"
        )
        for trigger in scaler["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            series = re.findall(r'(specdec_\w+){[^}]*service="llm-(\w+)-headless"', query)
            assert len(series) == query.count("specdec_") > 0
            for name, exporter in series:
                assert name.removesuffix("_bucket") in exported[exporter]


def test_the_production_example_has_tls_on_every_hop(render: Render) -> None:
    documents = render("production")
    for role, _, container in containers(documents):
        flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in container["args"])
        assert {"tls-dir", "metrics-tls"} <= flags.keys()
        assert ("tls-verify-clients" in flags) == (role != "gateway"), "OpenAI's clients show no certificates"
        if role in WITH_REDIS:
            assert "redis-tls-dir" in flags
        assert flags["otlp-endpoint"].startswith("https://") and "otlp-ca-file" in flags
        if role == "coordinator":
            assert "replica-tls-dir" in flags
        elif role == "gateway":
            assert "coordinator-tls-dir" in flags
        else:
            callers = ("-coordinator", "-draft") if role == "target" else ("-coordinator",)
            certificates = [
                d for d in documents if d["kind"] == "Certificate" and d["metadata"]["name"].endswith(callers)
            ]
            names = [flags[flag] for flag in ("tls-allowed-client-names", "tls-draft-names") if flag in flags]
            assert len(names) == len(certificates) == len(callers)
            for name, certificate in zip(names, certificates, strict=True):
                assert name in certificate["spec"]["dnsNames"]
                assert "client auth" in certificate["spec"]["usages"]
    monitors = [d for d in documents if d["kind"] == "ServiceMonitor"]
    assert len(monitors) == len(SETTINGS)
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["endpoints"]
        shown = set() if component(monitor) == "gateway" else {"cert", "keySecret"}
        assert endpoint["scheme"] == "https" and {"ca", *shown} <= endpoint["tlsConfig"].keys()


@every_case
def test_certificates_name_what_is_called(case: str, render: Render) -> None:
    documents = render(case)
    names = {component(d): set(d["spec"]["dnsNames"]) for d in documents if d["kind"] == "Certificate"}
    for role, _, container in containers(documents):
        flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in container["args"])
        if names and role == "coordinator":
            assert flags["replica-tls-server-name"] in names["target"] & names.get("draft", names["target"])
        if names and not flags.keys().isdisjoint(("target", "link-targets")):
            assert flags["replica-tls-server-name"] in names["target"]
            (own,) = [d for d in documents if d["kind"] == "Certificate" and component(d) == role]
            assert "client auth" in own["spec"]["usages"]
            assert names[role] & set(_flag(documents, "target", "--tls-draft-names").split(","))
        if names and role == "gateway":
            host = flags["coordinators"].removeprefix("dns:///").partition(":")[0]
            assert host in names["coordinator"]
        if "redis" in names and role in WITH_REDIS:
            host = flags["redis-url"].partition("//")[2].partition(":")[0]
            assert host in names["redis"]
    for monitor in (d for d in documents if d["kind"] == "ServiceMonitor" and names):
        for endpoint in monitor["spec"]["endpoints"]:
            if "tlsConfig" in endpoint:
                assert endpoint["tlsConfig"]["serverName"] in names[component(monitor)]


@every_case
def test_the_test_hook_calls_the_client_with_flags_it_has(case: str, render: Render) -> None:
    documents = render(case)
    pods = {d["metadata"]["name"].rpartition("-")[2]: d for d in documents if d["kind"] == "Pod"}
    if case == "everything":  # It has API keys, and none for the test.
        assert not pods
        return
    assert pods.keys() == {"generate"} | ({"complete"} if case != "without-gateways" else set())
    (container,) = pods["generate"]["spec"]["containers"]
    assert container["command"] == ["python3", "-c"]
    assert '["specdec", "generate", "--timeout-s"' in container["args"][0]
    command = typer.main.get_command(app).get_command(None, "generate")  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}
    flags, prompt = container["args"][2:-1], container["args"][-1]
    assert {flag.partition("=")[0] for flag in flags} <= options
    assert prompt and not prompt.startswith("-")
    coordinator = next(container for role, _, container in containers(documents) if role == "coordinator")
    demands_key = any(flag.startswith("--api-keys-file=") for flag in coordinator["args"])
    for pod in pods.values():
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        (container,) = pod["spec"]["containers"]
        assert (API_KEY_VARIABLE in {variable["name"] for variable in container["env"]}) == demands_key
