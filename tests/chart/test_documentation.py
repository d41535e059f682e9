"""The chart's copies and its documentation say what their sources say; UPDATE_GOLDEN=1 renews them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from specdec.commands.app import app
from tests.chart.rendered import CASES, CHART, ROOT, Render

_ROLES = ("coordinator", "gateway", "target", "draft")
_PARAM = re.compile(r"(?m)^\s*## @param (\S+) (.+)$")


def _copies() -> Iterator[tuple[Path, Path]]:
    for name in ("alerts.yml", "recording.yml"):
        yield ROOT / "deploy/prometheus" / name, CHART / "files" / name


def _values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def _leaves(values: dict[str, Any], documented: set[str], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in documented:
            yield from _leaves(value, documented, f"{key}.")
        else:
            yield key


def test_rules_of_the_chart_are_those_of_deploy() -> None:
    if os.environ.get("UPDATE_GOLDEN") == "1":
        for source, copy in _copies():
            shutil.copyfile(source, copy)
    copies = {copy: source.read_text() for source, copy in _copies()}
    assert set((CHART / "files").glob("*.yml")) == set(copies)
    for copy, text in copies.items():
        assert copy.read_text() == text, f"{copy} differs; rerun with UPDATE_GOLDEN=1"


def test_rules_and_dashboards_reach_the_cluster_and_only_what_is_absent_is_given_the_namespace(render: Render) -> None:
    documents = render("monitoring")
    found = [d for d in documents if d["kind"] == "PrometheusRule"]
    absent = "absent(specdec_coordinator_requests_running"
    (namespace,) = {d["metadata"]["namespace"] for d in found}
    rules = {name: (CHART / f"files/{name}.yml").read_text() for name in ("alerts", "recording")}
    rules["alerts"] = rules["alerts"].replace(f"{absent})", f'{absent}{{namespace="{namespace}"}})')
    assert {d["metadata"]["name"].rpartition("-")[2]: d["spec"] for d in found} == {
        name: yaml.safe_load(text) for name, text in rules.items()
    }
    maps = [d for d in documents if d["kind"] == "ConfigMap"]
    assert all(d["metadata"]["labels"]["grafana_dashboard"] == "1" for d in maps)
    shown = {name: json.loads(text) for d in maps for name, text in d["data"].items()}
    assert shown == {path.name: json.loads(path.read_text()) for path in (CHART / "files/dashboards").iterdir()}


def test_alerts_and_panels_lead_to_the_runbooks_of_the_operator() -> None:
    base = "https://runbooks.example.com/specdec"
    values = {
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "runbookBaseUrl": base},
        "dashboards": {"enabled": True},
    }
    with helm_python.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="demo", namespace="llm").values()
    documents = [d for text in texts if "kind:" in text for d in yaml.safe_load_all(text) if d]
    (alerts,) = [d for d in documents if d["kind"] == "PrometheusRule" and d["metadata"]["name"].endswith("alerts")]
    urls = {rule["annotations"]["runbook_url"] for group in alerts["spec"]["groups"] for rule in group["rules"]}
    assert {url.partition("#")[0] for url in urls} == {base}
    pages = [text for d in documents if d["kind"] == "ConfigMap" for text in d["data"].values()]
    links = {link for page in pages for link in re.findall(r"Runbook: ([^\s#]+#\w+)", page)}
    assert links == urls


@pytest.mark.parametrize(
    ("values", "warnings"),
    [
        (
            {"tls": {"enabled": True, "https": False, "certManager": {"enabled": True, "issuerRef": {"name": "i"}}}},
            {"tls.https", "apiKeys.existingSecret"},
        ),
        ({}, {"tls.enabled", "apiKeys.existingSecret"}),
        ({"coordinator": {"replicas": 2}}, {"several coordinators", "tls.enabled", "apiKeys.existingSecret"}),
        ({"coordinator": {"autoscaling": {"enabled": True}}, "redis": {"mode": "bundled"}}, {"tls.", "apiKeys."}),
        ({"apiKeys": {"existingSecret": "k"}, "networkPolicy": {"enabled": False}}, {"tls.", "networkPolicy.enabled"}),
        ({"tracing": {"endpoint": "http://c:4317", "content": True}}, {"tls.", "apiKeys.", "tracing.content"}),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://cache.example.com/0"}}},
            {"redis.external.url", "tls.", "apiKeys."},
        ),
        (yaml.safe_load((CHART / "examples/production.yaml").read_text()), set()),
    ],
)
def test_the_notes_warn_of_what_is_missing(values: dict[str, Any], warnings: set[str]) -> None:
    with helm_python.Chart.load(str(CHART)) as chart:
        notes = chart.render(values, name="demo", namespace="llm")["specdec/templates/NOTES.txt"]
    found = re.findall(r"(?m)^WARNING: (.+)", notes)
    assert len(found) == len(warnings)
    assert all(any(text.startswith(start) for text in found) for start in warnings)


def test_the_notes_name_a_runtime_class_without_which_no_pod_is_made() -> None:
    told = "No pod of targets is made without the RuntimeClass nvidia"
    for values, is_told in (({}, False), ({"target": {"runtimeClassName": "nvidia"}}, True)):
        with helm_python.Chart.load(str(CHART)) as chart:
            notes = chart.render(values, name="demo", namespace="llm")["specdec/templates/NOTES.txt"]
        assert (told in notes) is is_told


@pytest.mark.parametrize("case", ["defaults", "two-gpus", "production", "everything"])
def test_the_notes_name_objects_that_exist_and_commands_that_run(case: str, render: Render) -> None:
    values: dict[str, Any] = {}
    for name in CASES[case].get("files", []):
        values |= yaml.safe_load((CHART / "examples" / name).read_text())
    values |= CASES[case].get("values", {})
    with helm_python.Chart.load(str(CHART)) as chart:
        notes = chart.render(values, name="demo", namespace="llm")["specdec/templates/NOTES.txt"]
    documents = render(case)
    made = {f"{d['kind'].lower()}/{d['metadata']['name']}" for d in documents}
    made |= {f"secret/{d['spec']['secretName']}" for d in documents if d["kind"] == "Certificate"}
    named = re.findall(r"\b(deployment|service|secret)[/ ](\S+-\S+)", notes)
    assert len(named) >= 2
    assert {f"{kind}/{name}" for kind, name in named} <= made
    ports = {
        f"{d['metadata']['name']}.llm.svc:{port['port']}"
        for d in documents
        if d["kind"] == "Service"
        for port in d["spec"]["ports"]
    }
    called = re.findall(r"[\w-]+\.llm\.svc:\d+", notes)
    assert len(called) == 3 and set(called) <= ports
    commands = re.findall(r"(?:^  |-- )specdec (.+)$", notes, re.MULTILINE)
    assert commands
    for command in commands:
        name, *arguments = shlex.split(command)
        # Parsed only: --help ends it before it calls anyone.
        result = CliRunner().invoke(app, [name, *arguments, "--help"])
        assert result.exit_code == 0, result.output
        options = {option for p in get_command(app).get_command(None, name).params for option in p.opts}  # type: ignore[attr-defined]
        assert {word for word in arguments if word.startswith("--")} <= options


def test_every_value_is_documented() -> None:
    documented = [key for key, _ in _PARAM.findall((CHART / "values.yaml").read_text())]
    assert len(documented) == len(set(documented))
    assert set(_leaves(_values(), set(documented))) == set(documented)


def test_values_that_the_readme_names_exist() -> None:
    values = _values()
    named = set(re.findall(r"`((?:<role>|[a-z]\w*)(?:\.[A-Za-z]\w*)+)[:`]", (CHART / "README.md").read_text()))
    named = {
        name
        for name in named
        if name.partition(".")[0] in {*values, "<role>"} and not name.endswith((".yaml", ".crt", ".key"))
    }
    assert len(named) > 40
    for name in sorted(named):
        roles = _ROLES if name.startswith("<role>") else ("",)
        assert any(_has(values, name.replace("<role>", role).split(".")) for role in roles), name


def _has(values: Any, path: list[str]) -> bool:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True
