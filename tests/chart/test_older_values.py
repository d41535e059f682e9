"""Values of the last release, which `helm upgrade --reuse-values` keeps: today's chart fills in what they lack."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.chart.rendered import CHART, CUSTOM_KINDS, Document, Helm, Render
from tests.chart.toggles import toggle_cases
from tests.support.for_each import for_each
from tests.support.releases import last_release

ADDED = CHART / "files/added-values.yaml"
CASES = {"defaults": {}, **{name: case["values"] for name, case in toggle_cases().items()}}


def added(new: Document, old: Document) -> Document:
    """The values that `old` lacks, at every depth."""
    found: Document = {}
    for key, value in new.items():
        if key not in old:
            found[key] = value
        elif isinstance(value, dict) and isinstance(old[key], dict):
            found |= {key: inner} if (inner := added(value, old[key])) else {}
    return found


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Today's chart with the last release's values.yaml, as helm makes it of --reuse-values."""
    folder = tmp_path_factory.mktemp("older") / "specdec"
    shutil.copytree(CHART, folder)
    shutil.copyfile(last_release().chart / "values.yaml", folder / "values.yaml")
    return folder


def rendered(helm: Helm, chart: Path, values: Document) -> list[Document]:
    done = helm("template", "demo", str(chart), "--namespace", "llm", "--kube-version", "1.31.0", values=values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]


def test_the_chart_has_a_list_of_all_values_that_the_last_release_had_not() -> None:
    values, known = read(CHART / "values.yaml"), read(ADDED) if ADDED.exists() else {}
    needed = added(values, read(last_release().chart / "values.yaml"))
    if os.environ.get("UPDATE_GOLDEN") == "1":
        # What older releases lacked stays in the list, as far as the chart still has it.
        known = _joined(needed, known, values)
        ADDED.write_text(
            "# Values that charts of older releases lack, with their defaults; written by UPDATE_GOLDEN=1 pytest "
            "tests/chart/test_older_values.py.\n" + yaml.safe_dump(known, sort_keys=False)
        )
    assert added(needed, known) == {}, "rerun with UPDATE_GOLDEN=1"
    assert _differing(known, values) == []


def _joined(one: Document, other: Document, values: Document) -> Document:
    """The keys of both that `values` has, with its defaults."""
    joined: Document = {}
    for key in [name for name in values if name in one or name in other]:
        parts = [part.get(key) if isinstance(part.get(key), dict) else {} for part in (one, other)]
        joined[key] = _joined(*parts, values[key]) if any(parts) else values[key]
    return joined


def _differing(known: Document, values: Document) -> list[str]:
    """Entries of the list whose default is another one today."""
    found = []
    for key, value in known.items():
        if isinstance(value, dict) and value and isinstance(values.get(key), dict):
            found += [f"{key}.{inner}" for inner in _differing(value, values[key])]
        elif key not in values or values[key] != value:
            found.append(key)
    return found


@for_each("case", CASES)
def test_todays_templates_render_with_the_values_of_the_last_release(
    case: str, helm: Helm, render: Render, older: Path
) -> None:
    new, old = render(case), rendered(helm, older, CASES[case])
    for document in old:
        if document["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(document, "1.31", strict=True)
    assert {(d["kind"], d["metadata"]["name"]) for d in old} == {(d["kind"], d["metadata"]["name"]) for d in new}


@pytest.mark.parametrize(
    ("values", "kind", "path", "expected"),
    [
        # Parts of a block that the last release had not.
        ({"gateway": {"replicas": 3}}, "Deployment", ("spec", "replicas"), 3),
        (
            {"gateway": {"service": {"type": "NodePort"}, "settings": {"allow_unauthenticated": True}}},
            "Service",
            ("spec", "type"),
            "NodePort",
        ),
        # false is not absent.
        ({"gateway": {"podDisruptionBudget": {"enabled": False}}}, "PodDisruptionBudget", (), None),
    ],
)
def test_a_part_of_a_new_block_may_be_set(
    values: Document, kind: str, path: tuple[str, ...], expected: object, helm: Helm, older: Path
) -> None:
    name = "demo-specdec-gateway"
    found: Any = [d for d in rendered(helm, older, values) if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    found = found[0] if found else None
    for key in path:
        found = found[key]
    assert found == expected


def test_what_is_null_in_values_of_today_stays_null(helm: Helm) -> None:
    values = {"gateway": {"resources": {"limits": {"memory": None}}}}
    (gateway,) = [
        d["spec"]["template"]["spec"]["containers"][0]
        for d in rendered(helm, CHART, values)
        if d["kind"] == "Deployment" and d["metadata"]["name"].endswith("-gateway")
    ]
    assert not gateway["resources"].get("limits")


def test_every_template_fills_in_values_before_it_reads_one() -> None:
    for path in (CHART / "templates").rglob("*"):
        if path.suffix in (".yaml", ".txt"):
            assert path.read_text(encoding="utf-8").startswith('{{- include "specdec.complete" . }}\n'), path
