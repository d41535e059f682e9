"""Values that are wrong are refused, and the message names the key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from tests.chart.rendered import CHART, SETTINGS, Document, Helm
from tests.support.for_each import for_each


@for_each(
    "values, named",
    [
        ({"target": {"replics": 2}}, "replics"),
        ({"targets": {}}, "targets"),
        ({"target": {"settings": {"max_runing": 3}}}, 'Property name of "max_runing"'),
        ({"gateway": {"settings": {"max_running": 3}}}, '"max_concurrent_requests"'),
        ({"target": {"model": {"source": "Qwen/Qwen3-8B"}}}, "target.model.source"),
        ({"target": {"model": {"source": "pvc://Claim"}}}, "target.model.source"),
        ({"global": {"imageRegistry": "https://registry"}}, "global.imageRegistry"),
        ({"target": {"gpu": {"count": "one"}}}, "target.gpu.count"),
        ({"target": {"updateStrategy": "recreate"}}, "target.updateStrategy"),
        ({"target": {"settings": {"port": 1}}}, 'target.settings: Property name of "port"'),
        ({"target": {"settings": {"max-batch-seqs": 1}}}, '"max-batch-seqs"'),
        ({"target": {"settings": {"max_batch_seqs": [1]}}}, "target.settings.max_batch_seqs"),
        ({"target": {"resources": {"limits": {"memory": "4 GB"}}}}, "target.resources.limits.memory"),
        ({"target": {"resources": {"limit": {}}}}, "limit"),
        ({"draft": {"enabled": "no"}}, "draft.enabled"),
        ({"draft": {"startupSeconds": 0}}, "draft.startupSeconds"),
        ({"draft": {"extraArgs": ["max-heads"]}}, "draft.extraArgs.0"),
        ({"coordinator": {"drainSeconds": -1}}, "coordinator.drainSeconds"),
        ({"coordinator": {"image": {"pullPolicy": "always"}}}, "coordinator.image.pullPolicy"),
        ({"coordinator": {"image": {"digest": "abc"}}}, "coordinator.image.digest"),
        ({"coordinator": {"image": {"repository": "specdec:latest"}}}, "coordinator.image.repository"),
        ({"target": {"image": {"repository": "https://ghcr.io/org/engine"}}}, "target.image.repository"),
        ({"draft": {"image": {"repository": "Org/Engine"}}}, "draft.image.repository"),
        ({"global": {"imageTag": "v1:2"}}, "global.imageTag"),
        ({"gateway": {"settings": {"coordinators": "x:1"}}}, 'Property name of "coordinators"'),
        ({"gateway": {"cache": {}}}, "cache"),
        ({"gateway": {"service": {"port": 0}}}, "gateway.service.port"),
        ({"gateway": {"ingress": {"path": "v1"}}}, "gateway.ingress.path"),
        ({"gateway": {"ingress": {"hosts": ["HTTP://x"]}}}, "gateway.ingress.hosts.0"),
        ({"gateway": {"enabled": False, "ingress": {"enabled": True}}}, "gateway.enabled is needed"),
        ({"networkPolicy": {"enabled": False}}, "gateway.settings.allow_unauthenticated is needed"),
        ({"gateway": {"ingress": {"enabled": True}}}, "networkPolicy.httpClients, apiKeys.existingSecret or"),
        ({"gateway": {"service": {"type": "NodePort"}}}, "networkPolicy.httpClients, apiKeys.existingSecret or"),
        (
            {"coordinator": {"service": {"type": "LoadBalancer"}}},
            "coordinator.settings.allow_unauthenticated is needed",
        ),
        (
            {"coordinator": {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "a"}]}}},
            "networkPolicy.clients, apiKeys.existingSecret or",
        ),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "gateway.httpRoute.parentRefs is needed"),
        ({"gateway": {"httpRoute": {"requestTimeout": "1 day"}}}, "gateway.httpRoute.requestTimeout"),
        ({"coordinator": {"service": {"type": "Ingress"}}}, "coordinator.service.type"),
        ({"coordinator": {"model": {}}}, "model"),
        ({"coordinator": {"podDisruptionBudget": {"maxUnavailable": "all"}}}, "podDisruptionBudget.maxUnavailable"),
        ({"target": {"autoscaling": {"enabled": True}}}, "target.autoscaling.prometheusAddress"),
        (
            {"coordinator": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}},
            "coordinator.autoscaling.maxReplicas (2) is below coordinator.autoscaling.minReplicas (5)",
        ),
        ({"target": {"podLabels": {"app.kubernetes.io/component": "gpu"}}}, "target.podLabels"),
        ({"target": {"probes": {"liveness": {"failures": 3}}}}, "target.probes.liveness"),
        ({"target": {"tmpSizeLimit": "lots"}}, "target.tmpSizeLimit"),
        ({"target": {"minReadySeconds": -1}}, "target.minReadySeconds"),
        ({"podSecurityContext": {"runAsUser": 0}}, "podSecurityContext.runAsUser"),
        ({"podSecurityContext": {"runAsNonRoot": False}}, "runAsNonRoot"),
        ({"podSecurityContext": {"seLinuxOptions": {"Level": "s0"}}}, "podSecurityContext.seLinuxOptions"),
        ({"tls": {"certManager": {"coordinatorDnsNames": "llm.example.com"}}}, "certManager.coordinatorDnsNames"),
        ({"tls": {"enabled": True}}, "tls.existingSecrets.coordinator"),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "tls.certManager.issuerRef.name"),
        ({"tls": {"certManager": {"duration": "90d"}}}, "tls.certManager.duration"),
        ({"networkPolicy": {"prometheus": {}}, "serviceMonitor": {"interval": 15}}, "serviceMonitor.interval"),
        ({"dashboards": {"labels": {"grafana_dashboard": 1}}}, "dashboards.labels.grafana_dashboard"),
        ({"test": {"prompt": "--help"}}, "test.prompt"),
        ({"test": {"apiKeySecret": {"name": "key"}}}, "test.apiKeySecret"),
        ({"ipFamily": 6}, "ipFamily"),
        ({"target": {"updateStep": 0}}, "target.updateStep"),
        ({"target": {"shmSizeLimit": "lots"}}, "target.shmSizeLimit"),
        ({"target": {"settings": {"redis_url": "redis://h"}}}, 'Property name of "redis_url"'),
        ({"coordinator": {"settings": {"otlp_endpoint": "x"}}}, 'Property name of "otlp_endpoint"'),
        ({"redis": {"mode": "cluster"}}, "redis.mode"),
        ({"redis": {"keyPrefix": "a:b"}}, "redis.keyPrefix"),
        ({"redis": {"timeoutSeconds": 0}}, "redis.timeoutSeconds"),
        ({"redis": {"registryTtlSeconds": 0}}, "redis.registryTtlSeconds"),
        ({"redis": {"bundled": {"maxMemory": "256Mi"}}}, "redis.bundled.maxMemory"),
        ({"redis": {"bundled": {"persistence": {}}}}, "persistence"),
        ({"redis": {"external": {"url": "http://redis"}}}, "redis.external.url"),
        ({"redis": {"external": {"url": "redis://user:password@redis"}}}, "redis.external.url"),
        ({"redis": {"mode": "external"}}, "redis.external.url"),
        (
            {"resumeSecret": {"key": "k"}, "redis": {"mode": "bundled", "bundled": {"passwordKey": "k"}}},
            "resumeSecret.key and redis.bundled.passwordKey must differ",
        ),
        ({"coordinator": {"settings": {"num_processes": 2}}}, "coordinator.settings.num_processes"),
        ({"redis": {"mode": "external", "external": {"url": "redis://h", "urlKey": "url"}}}, "redis.external.urlKey"),
        ({"redis": {"mode": "external", "external": {"urlKey": "url"}}}, "redis.external.existingSecret"),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://h", "tls": {"existingSecret": "ca"}}}},
            "redis.external.url must begin with rediss",
        ),
        (
            {"redis": {"mode": "external", "external": {"url": "rediss://h", "tls": {"clientCertificate": True}}}},
            "redis.external.tls.existingSecret",
        ),
        (
            {
                "redis": {"mode": "bundled"},
                "tls": {
                    "enabled": True,
                    "existingSecrets": {"coordinator": "c", "gateway": "g", "target": "t", "draft": "d"},
                },
            },
            "tls.existingSecrets.redis",
        ),
        ({"tls": {"metrics": True}}, "tls.enabled"),
        ({"networkPolicy": {"egress": {"redis": {"ports": ["redis"]}}}}, "networkPolicy.egress.redis.ports"),
        ({"networkPolicy": {"egress": {"dns": [{"namespace": "kube-system"}]}}}, "networkPolicy.egress.dns"),
        ({"prometheusRule": {"runbookBaseUrl": "runbooks"}}, "prometheusRule.runbookBaseUrl"),
        ({"tracing": {"endpoint": "collector:4317"}}, "tracing.endpoint"),
        ({"tracing": {"sampleRatio": 5}}, "tracing.sampleRatio"),
        ({"tracing": {"headersSecret": {"name": "otlp"}}}, "tracing.headersSecret"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(values: Document, named: str, helm: Helm) -> None:
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=values)
    assert done.returncode != 0
    assert named in done.stderr


_OF_TLS = re.compile("(^|_)tls(_dir|_verify_clients|_server_name|_.*file)?$")
_OF_REDIS = re.compile("redis_.*|advertise_address|registry_ttl_s")
_OF_ALL = re.compile("host|(metrics_|health_)?port|drain_s|stop_grace_s|otlp_.*")
_OF_A_ROLE = {
    "coordinator": "targets|drafts|api_keys_file|resume_secret|trace_sample_ratio|trace_content",
    "gateway": "coordinators|models|public_metrics|trace_sample_ratio",
    "target": "model|revision|load_timeout_s|tls_allowed_client_names|nnodes|node_rank|master_addr|master_port",
    "draft": "model|revision|load_timeout_s|tls_allowed_client_names",
}
"""Settings that the chart derives from other values."""


def test_the_schema_knows_each_setting_that_the_chart_does_not_derive() -> None:
    roles = json.loads((CHART / "values.schema.json").read_text())["properties"]
    for role, settings in SETTINGS.items():
        known = roles[role]["properties"]["settings"]["propertyNames"]["enum"]
        others = [name for name in settings.model_fields if not _OF_TLS.search(name)]
        for derived in (_OF_REDIS, _OF_ALL, re.compile(_OF_A_ROLE[role])):
            others = [name for name in others if not derived.fullmatch(name)]
        assert known == sorted(others), role


@for_each("case", yaml.safe_load((Path(__file__).parent / "refused.yaml").read_text()))
def test_what_kubernetes_would_refuse_is_refused_with_its_key(case: Document, helm: Helm) -> None:
    done = helm("template", "demo", str(CHART), "--kube-version", "1.31.0", values=case["values"])
    assert (done.returncode != 0) is ("named" in case), done.stderr
    assert case.get("named", "") in done.stderr
