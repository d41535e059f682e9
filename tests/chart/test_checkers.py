"""What other tools say of the chart: helm 4, the operators' CRDs, checkov."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.chart.rendered import CASES, CHART, CUSTOM_KINDS, ROOT, Document, Render, component
from tests.support.for_each import for_each

NODE_MODULES = ROOT / ".tools/node_modules"
PACKAGED_KINDS = CUSTOM_KINDS - {"InferencePool"}
"""Kinds whose CRDs the packages have; test_inference_pool.py has that of the other."""
CHECKOV = ROOT / ".tools/checkov/bin/checkov"
# Packages that have the CRDs of a group; keda-oldest has KEDA 2.10's, for the chart's README names the next.
GROUPS = {
    "cert-manager.io": ("cert-manager",),
    "gateway.networking.k8s.io": ("gateway-api",),
    "keda.sh": ("keda", "keda-oldest"),
    "monitoring.coreos.com": ("prometheus-operator",),
}
# The SDK cannot be told which Kubernetes to render for and takes its own, which is newer than all the chart asks about.
HELM_4_KUBERNETES = "1.37.0"


def _merged(case: str) -> dict[str, Any]:
    """The values of a case in one piece."""

    def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        merged = copy.deepcopy(one)
        for key, value in other.items():
            is_both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merge(merged[key], value) if is_both else value
        return merged

    values: dict[str, Any] = {}
    for name in CASES[case].get("files", []):
        values = merge(values, yaml.safe_load((CHART / "examples" / name).read_text()))
    return merge(values, CASES[case].get("values", {}))


def _by_name(documents: list[Document]) -> dict[tuple[str, str], Document]:
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


@for_each("case", CASES)
def test_helm_4_finds_nothing_and_renders_what_helm_3_renders(case: str, render: Render) -> None:
    values = _merged(case)
    report = helm_python.lint(str(CHART), values, strict=True, kube_version="v1.31.0")
    assert not report["errors"] and all(message["severity"] <= 1 for message in report["messages"])
    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="demo", namespace="llm")
    documents = [
        document
        for path, text in files.items()
        if path.endswith(".yaml")
        for document in yaml.load_all(text, Loader=yaml.CSafeLoader)
        if document
    ]
    assert _by_name(documents) == _by_name(render(case, HELM_4_KUBERNETES))


def _custom(render: Render) -> list[Document]:
    return [document for case in CASES for document in render(case) if document["kind"] in PACKAGED_KINDS]


def _schema_problems(objects: list[Document]) -> list[str]:
    """What the CRDs' schemas forbid: wrong types, values and missing fields."""
    script = Path(__file__).with_name("validate_custom_resources.mjs")
    asked = json.dumps({"objects": objects, "packages": GROUPS})
    command = ["node", str(script), str(NODE_MODULES)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    problems: list[str] = json.loads(done.stdout)
    return problems


def _type_problems(objects: list[Document], folder: Path) -> str:
    """What the CRDs' types forbid: fields that do not exist, which the schemas let pass."""
    imports, constants = set(), []
    for index, document in enumerate(objects):
        group, _, version = document["apiVersion"].partition("/")
        kind = document["kind"]
        for number, name in enumerate(GROUPS[group]):
            path = NODE_MODULES / "@kubernetes-models" / name / group / version / kind
            imports.add(f'import type {{ I{kind} as {kind}{number} }} from "{path}";')
            constants.append(f"export const object{index}_{number}: {kind}{number} = {json.dumps(document)};")
    (folder / "objects.ts").write_text("\n".join([*sorted(imports), *constants]))
    options = {"module": "esnext", "moduleResolution": "bundler", "target": "es2022", "strict": True}
    settings = {"compilerOptions": {**options, "noEmit": True, "skipLibCheck": True}, "files": ["objects.ts"]}
    (folder / "tsconfig.json").write_text(json.dumps(settings))
    command = ["node", str(NODE_MODULES / "typescript/bin/tsc"), "--project", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout


def test_objects_of_operators_are_what_their_crds_say(render: Render, tmp_path: Path) -> None:
    objects = _custom(render)
    assert {document["kind"] for document in objects} == PACKAGED_KINDS
    assert _schema_problems(objects) == []
    assert _type_problems(objects, tmp_path) == ""


def _without_a_trigger_type(scaler: Document) -> None:
    del scaler["spec"]["triggers"][0]["type"]


def _with_a_number_as_interval(monitor: Document) -> None:
    monitor["spec"]["endpoints"][0]["interval"] = 15


def _with_a_field_that_does_not_exist(certificate: Document) -> None:
    certificate["spec"]["dnsName"] = "demo"


def test_the_crd_checks_find_what_is_wrong(render: Render, tmp_path: Path) -> None:
    objects = _custom(render)

    def spoilt(kind: str, spoil: Callable[[Document], None]) -> list[Document]:
        document = copy.deepcopy(next(document for document in objects if document["kind"] == kind))
        spoil(document)
        return [document]

    assert "type" in " ".join(_schema_problems(spoilt("ScaledObject", _without_a_trigger_type)))
    assert "interval" in " ".join(_schema_problems(spoilt("ServiceMonitor", _with_a_number_as_interval)))
    assert "dnsName" in _type_problems(spoilt("Certificate", _with_a_field_that_does_not_exist), tmp_path)


@pytest.mark.long
def test_checkov_finds_only_what_is_meant(render: Render, tmp_path: Path) -> None:
    skips = yaml.safe_load(Path(__file__).with_name("checkov_skips.yaml").read_text())
    for case in CASES:
        documents = render(case)
        if any(document["kind"] == "NetworkPolicy" for document in documents):
            kept = [document for document in documents if component(document) != "monitoring"]
            (tmp_path / f"{case}.yaml").write_text(yaml.safe_dump_all(kept))
    flags = ["--framework", "kubernetes", "--skip-download", "--quiet", "--output", "json"]
    done = subprocess.run(
        [str(CHECKOV), "--directory", str(tmp_path), *flags],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 0 and report["summary"]["parsing_errors"] == 0
    found = {(f["check_id"], f["resource"], f["check_name"]) for f in report["results"]["failed_checks"]}
    used = [
        {finding for finding in found if finding[0] == skip["check"] and re.search(skip["resource"], finding[1])}
        for skip in skips
    ]
    assert sorted(found - set().union(*used)) == []
    assert [skip["check"] for skip, findings in zip(skips, used, strict=True) if not findings] == []
    assert all(skip["reason"] for skip in skips)
