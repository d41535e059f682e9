"""The bill of materials: all that an engine's environment needs, nothing of what only developers need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import specdec

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("sbom") / "new" / "specdec.cdx.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run([sys.executable, ROOT / "releases" / "sbom.py", path], env=environment, check=True)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def needed_by(name: str, extras: set[str]) -> set[str]:
    """What an installed package asks for, and so on; extras of what it asks for are left out."""
    found: set[str] = set()
    pending = [(name, extras)]
    while pending:
        current, asked = pending.pop()
        for requirement in map(Requirement, metadata.requires(current) or ()):
            key = canonicalize_name(requirement.name)
            marker = requirement.marker
            is_asked = marker is None or any(marker.evaluate({"extra": extra}) for extra in asked | {""})
            if is_asked and key not in found:
                found.add(key)
                pending.append((key, set()))
    return found


def test_it_names_this_version(bill: dict[str, Any]) -> None:
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["purl"] == f"pkg:pypi/specdec@{specdec.__version__}"
    assert bill["metadata"]["timestamp"].startswith("2023-11-14T22:13:20")


def test_it_lists_what_is_needed_with_the_versions_that_are_installed(bill: dict[str, Any]) -> None:
    listed = {canonicalize_name(part["name"]): part["version"] for part in bill["components"]}
    needed = needed_by("specdec", {"engine"})
    assert {"torch", "grpcio", "numpy"} <= needed
    assert {name: metadata.version(name) for name in needed} == {name: listed.get(name) for name in needed}


def test_it_lists_nothing_that_only_developers_need(bill: dict[str, Any]) -> None:
    names = {canonicalize_name(part["name"]) for part in bill["components"]}
    assert not names & {"pytest", "mypy", "ruff", "mkdocs-material", "cyclonedx-bom", "grpcio-tools", "specdec"}


def test_all_that_depends_on_another_is_listed_once(bill: dict[str, Any]) -> None:
    refs = [part["bom-ref"] for part in bill["components"]]
    assert len(refs) == len(set(refs))
    known = {*refs, bill["metadata"]["component"]["bom-ref"]}
    assert {entry["ref"] for entry in bill["dependencies"]} == known
    assert {ref for entry in bill["dependencies"] for ref in entry.get("dependsOn", ())} <= known
