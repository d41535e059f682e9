"""Dashboards, rules and runbooks are whole: what they refer to exists, and every alert has its tests."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.for_each import for_each

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARDS = sorted((ROOT / "helm/specdec/files/dashboards").glob("*.json"))
RULES = [PROMETHEUS / "recording.yml", PROMETHEUS / "alerts.yml"]
RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def test_dashboards_are_what_the_script_writes() -> None:
    check = subprocess.run(
        [sys.executable, GRAFANA / "build.py", "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


def test_there_is_a_page_for_each_purpose_under_an_id_of_its_own() -> None:
    pages = {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}
    assert pages.keys() == {"overview", "gateway", "speculation", "coordinator", "target", "draft"}
    assert {name: page["uid"] for name, page in pages.items()} == {name: f"specdec-{name}" for name in pages}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_works_on_any_data_source(path: Path) -> None:
    page = json.loads(path.read_text())
    assert page["schemaVersion"] >= 39
    assert page["id"] is None
    assert page["templating"]["list"][0]["type"] == "datasource"
    for panel in panels(path):
        sources = [panel["datasource"], *(query["datasource"] for query in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_panel_says_what_it_shows_and_in_which_unit(path: Path) -> None:
    for panel in panels(path):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_has_a_legend_and_asks_for_the_chosen_namespace_and_instances(path: Path) -> None:
    variables = [variable["name"] for variable in json.loads(path.read_text())["templating"]["list"]]
    assert variables[:2] == ["datasource", "namespace"]
    for panel in panels(path):
        for query in panel["targets"]:
            assert query["legendFormat"] or panel["type"] == "table", panel["title"]
            for selector in re.findall(r"\bspecdec[_:][\w:]+({[^}]*})?", query["expr"]):
                for variable in variables[1:]:
                    assert f'{variable}=~"${variable}"' in selector, query["expr"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_all_namespaces_and_instances_are_a_pattern_that_holds_without_such_a_label(path: Path) -> None:
    for variable in json.loads(path.read_text())["templating"]["list"][1:]:
        assert (variable["includeAll"], variable["multi"], variable["allValue"]) == (True, True, ".*")
        assert variable["definition"].endswith(f", {variable['name']})")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_quantiles_are_of_all_buckets_and_rates_follow_the_scrape_interval(path: Path) -> None:
    for panel in panels(path):
        for query in panel["targets"]:
            if "histogram_quantile" in query["expr"]:
                assert re.search(r"sum by \([^)]*\ble\b[^)]*\)", query["expr"]), query["expr"]
            assert re.findall(r"\brate\([^\[]*\[([^\]]*)\]", query["expr"]) == ["$__rate_interval"] * len(
                re.findall(r"\brate\(", query["expr"])
            )


def test_each_alert_has_a_panel_that_names_its_runbook() -> None:
    texts = [panel["description"] for path in DASHBOARDS for panel in panels(path)]
    named = {anchor for text in texts for anchor in re.findall(r"Runbook: docs/operations\.md#(\w+)\.$", text)}
    assert named == {alert["alert"].lower() for alert in alerts()}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_fill_the_grid_without_overlap(path: Path) -> None:
    everything = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells


def test_the_provisioned_data_source_is_the_scrape_interval_of_prometheus() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert source["datasources"][0]["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_promtool_accepts_configuration_and_rules() -> None:
    subprocess.run(["promtool", "check", "config", PROMETHEUS / "prometheus.yml"], check=True, capture_output=True)
    subprocess.run(["promtool", "check", "rules", "--lint-fatal", *RULES], check=True, capture_output=True)


def test_each_alert_fires_when_it_should_and_is_silent_on_healthy_data() -> None:
    run = subprocess.run(["promtool", "test", "rules", *RULE_TESTS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_each_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for path in RULE_TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for check in case.get("alert_rule_test", ()):
                (fires if check["exp_alerts"] else silent).add(check["alertname"])
    names = {alert["alert"] for alert in alerts()}
    assert fires == names
    assert silent == names


@for_each("alert", alerts())
def test_an_alert_tells_how_bad_it_is_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"page", "ticket"}
    annotations = alert["annotations"]
    assert annotations["summary"]
    assert annotations["description"].endswith(".")
    path, anchor = annotations["runbook_url"].split("#")
    assert anchor == alert["alert"].lower()
    sections = re.findall(r"^### (\w+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert alert["alert"] in sections


def test_runbooks_name_panels_that_are_there() -> None:
    runbooks = (ROOT / "docs" / "operations.md").read_text().partition("## When an alert fires")[2]
    titles = {panel["title"] for path in DASHBOARDS for panel in panels(path)}
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*.]+)\*(?!\*)", runbooks.replace("\n", " ")))
    assert len(named) > 10
    assert {" ".join(name.split()) for name in named} <= titles


def test_each_runbook_has_its_alert() -> None:
    sections = re.findall(r"^### (\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(alert["alert"] for alert in alerts())
