"""Who may call whom in the cluster."""

from __future__ import annotations

import re

import yaml

from tests.chart.rendered import CASES, CHART, WITH_REDIS, Document, Helm, Render, component, containers
from tests.support.for_each import for_each

RELAYED = "relayed-proposals"
every_case = for_each("case", CASES)


def _policies(documents: list[Document], *, of_jobs: bool = False) -> dict[str, Document]:
    """By component; those of Jobs come and go with them."""
    found = [d for d in documents if d["kind"] == "NetworkPolicy" and ("annotations" in d["metadata"]) is of_jobs]
    return {component(d): d["spec"] for d in found}


def _peers(rule: Document, side: str) -> list[str]:
    return [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule[side]]


def _ports(rule: Document) -> list[int]:
    return [port["port"] for port in rule["ports"]]


@every_case
def test_every_pod_has_a_policy_or_none_has(case: str, render: Render) -> None:
    documents = render(case)
    policies = _policies(documents)
    if case == "nothing-optional" or "network-policy=off" in case:
        assert not policies
        return
    assert policies.keys() == {component(d) for d in documents if d["kind"] == "Deployment"} | {"test"}
    jobs = {component(d): d["metadata"]["annotations"] for d in documents if d["kind"] == "Job"}
    hooks = {component(d): d["metadata"].get("annotations") for d in documents if d["kind"] == "NetworkPolicy"}
    once = _policies(documents, of_jobs=True)
    assert once.keys() == (jobs.keys() - {"test"} if "egress" in policies["test"] else set())
    for name in once:  # they are there before the Job that needs them
        assert hooks[name]["helm.sh/hook"] == jobs[name]["helm.sh/hook"]
        assert int(hooks[name]["helm.sh/hook-weight"]) < int(jobs[name]["helm.sh/hook-weight"])
    assert "ingress" not in policies["test"]
    for name, policy in policies.items():
        assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == name


@every_case
def test_a_pod_trusts_who_reaches_it_only_behind_its_policy_and_where_there_are_no_keys(
    case: str, render: Render
) -> None:
    documents = render(case)
    policies = _policies(documents)
    flags = {role: container["args"] for role, _, container in containers(documents)}
    has_keys = any(flag.startswith("--api-keys-file=") for flag in flags["coordinator"])
    for role, given in flags.items():
        may_have_key = role in ("coordinator", "gateway")
        told_by_user = role == "gateway" and not policies and not has_keys
        expected = (role in policies and not (has_keys and may_have_key)) or told_by_user
        assert ("--allow-unauthenticated" in given) is expected, role


@every_case
def test_only_coordinators_reach_replicas_and_only_prometheus_reaches_metrics(case: str, render: Render) -> None:
    documents = render(case)
    policies = _policies(documents)
    if case in (RELAYED, "defaults"):
        assert _drafts_call_targets(documents) == (case != RELAYED)
    for role in policies.keys() - {"redis", "test"}:
        health, metrics, grpc = policies[role]["ingress"]
        assert "from" not in health and _ports(health) == [8081]
        assert metrics["from"]
        if role in ("target", "draft"):
            is_called = role == "target" and _drafts_call_targets(documents)
            assert _peers(grpc, "from") == ["coordinator", *(["draft"] if is_called else [])]


@every_case
def test_whom_no_key_and_no_certificate_names_is_named_by_the_policy(case: str, render: Render) -> None:
    documents = render(case)
    policies = _policies(documents)
    flags = {role: container["args"] for role, _, container in containers(documents)}
    has_keys = any(flag.startswith("--api-keys-file=") for flag in flags["coordinator"])
    for role in policies.keys() & {"coordinator", "gateway"}:
        *_, calls = policies[role]["ingress"]
        assert "from" in calls or has_keys or "--tls-verify-clients" in flags[role], role


def test_by_default_only_pods_with_the_label_of_clients_call_coordinators_and_gateways(render: Render) -> None:
    policies = _policies(render("defaults"))
    for role, others in (("coordinator", ["gateway", "test"]), ("gateway", ["test"])):
        *_, calls = policies[role]["ingress"]
        assert calls["from"][0] == {"podSelector": {"matchLabels": {"demo-specdec-client": "true"}}}
        assert _peers({"from": calls["from"][1:]}, "from") == others


@for_each(
    "role, told", [(role, told) for role in ("coordinator", "gateway") for told in ("key", "setting", "argument")]
)
def test_with_keys_or_where_the_user_says_so_every_pod_calls(role: str, told: str, helm: Helm) -> None:
    values = {
        "key": {"apiKeys": {"existingSecret": "keys"}},
        "setting": {role: {"settings": {"allow_unauthenticated": True}}},
        "argument": {role: {"extraArgs": ["--allow-unauthenticated"]}},
    }[told]
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=values)
    policies = _policies([document for document in yaml.safe_load_all(done.stdout) if document])
    *_, calls = policies[role]["ingress"]
    assert "from" not in calls


@every_case
def test_only_the_services_reach_the_bundled_redis_and_it_calls_nobody(case: str, render: Render) -> None:
    documents = render(case)
    policies = _policies(documents)
    if "redis" in policies:
        (rule,) = policies["redis"]["ingress"]
        assert set(_peers(rule, "from")) == {role for role, _, _ in containers(documents)} - {"gateway"}
        assert policies["redis"]["policyTypes"] == ["Ingress", "Egress"]
        assert "egress" not in policies["redis"]


@every_case
def test_with_egress_policies_pods_call_what_their_flags_name(case: str, render: Render) -> None:
    documents = render(case)
    policies = _policies(documents)
    for role, _, container in containers(documents):
        rules = policies.get(role, {}).get("egress")
        if rules is None:
            assert "egress" not in case and case != "production"
            continue
        called = {53}
        for flag in container["args"]:
            name, _, value = flag.partition("=")
            if name in ("--coordinators", "--targets", "--target", "--link-targets", "--drafts", "--otlp-endpoint"):
                called.add(int(value.rpartition(":")[2]))
            elif name == "--models":
                called |= {int(each.rpartition(":")[2]) for each in value.split(",")}
            elif name == "--redis-url" and not _has_bundled_redis(documents):
                called |= {int(port) for port in re.findall(r":(\d+)\b", value)}
            elif name == "--redis-key-prefix":
                called |= {6379} if _has_bundled_redis(documents) else {6379, 26379}
            elif name == "--model" and not value.startswith("/"):
                called.add(443)
        stores = [each["value"] for each in container["env"] if each["name"] == "AWS_ENDPOINT_URL"]
        called |= {int(port) for store in stores for port in re.findall(r":(\d+)\b", store)}
        assert {port for rule in rules for port in _ports(rule)} == called
        inside = {name for rule in rules if rule.get("to") for name in _inside(rule)}
        callers = {"coordinator": {"target", "draft"}, "gateway": {"coordinator"}}
        if _drafts_call_targets(documents):
            callers["draft"] = {"target"}
        called_inside = callers.get(role, set())
        uses_redis = role in WITH_REDIS and _has_bundled_redis(documents)
        assert inside == called_inside | ({"redis"} if uses_redis else set())


@every_case
def test_with_egress_policies_the_test_pod_still_reaches_coordinators(case: str, render: Render) -> None:
    policies = _policies(render(case))
    if "egress" not in policies.get("coordinator", {}):
        assert "egress" not in policies.get("test", {})
        return
    assert policies["test"]["policyTypes"] == ["Ingress", "Egress"]
    dns, coordinators, *gateways = policies["test"]["egress"]
    assert set(_ports(dns)) == {53}
    assert (_peers(coordinators, "to"), _ports(coordinators)) == (["coordinator"], [50051])
    assert [(_peers(rule, "to"), _ports(rule)) for rule in gateways] == [(["gateway"], [8000])]


def test_egress_policies_open_the_ports_that_urls_name(helm: Helm) -> None:
    values = {
        "redis": {"mode": "external", "external": {"url": "rediss+sentinel://a:7001,[fd00::7002]:7003/main/0"}},
        "tracing": {"endpoint": "http://collector:5555"},
        "networkPolicy": {"egress": {"enabled": True}},
    }
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=values)
    assert done.returncode == 0, done.stderr
    policies = _policies([document for document in yaml.safe_load_all(done.stdout) if document])
    for role in ("coordinator", "target", "draft"):
        ports = {port for rule in policies[role]["egress"] for port in _ports(rule)}
        assert {7001, 7003, 5555} <= ports
        assert not ports & {7002, 0}


def test_where_other_pods_may_call_nobody_jobs_reach_the_hub_and_the_api_server(helm: Helm) -> None:
    values = {
        "redis": {"mode": "bundled"},
        "target": {
            "model": {"source": "hf://org/name", "fetch": {"enabled": True, "beforeUpgrade": True}},
            "cache": {"existingClaim": "models"},
        },
        "networkPolicy": {"egress": {"enabled": True, "extra": [{"ports": [{"port": 8443}]}]}},
    }
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=values)
    assert done.returncode == 0, done.stderr
    policies = _policies([document for document in yaml.safe_load_all(done.stdout) if document], of_jobs=True)
    assert policies["secrets"]["egress"] == [{}]
    assert {port for rule in policies["fetch"]["egress"] for port in _ports(rule)} == {53, 443, 8443}


def _drafts_call_targets(documents: list[Document]) -> bool:
    flags = [flag for role, _, container in containers(documents) if role == "draft" for flag in container["args"]]
    return any(flag.startswith(("--target=", "--link-targets=")) for flag in flags)


def _has_bundled_redis(documents: list[Document]) -> bool:
    return any(d["kind"] == "Deployment" and component(d) == "redis" for d in documents)


def _inside(rule: Document) -> list[str]:
    """Components of this release among a rule's peers."""
    return _peers(rule, "to") if all("podSelector" in peer for peer in rule["to"]) else []
