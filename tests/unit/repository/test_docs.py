"""What the documentation refers to exists: pages, sections, metrics, variables, events of the log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from pydantic import BaseModel

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.gateway.settings import GatewaySettings
from specdec.telemetry.catalogue import exported_series
from tests.support.for_each import for_each

pytestmark = pytest.mark.smoke
ROOT = Path(__file__).parents[3]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/*.md", "bench/*.md", "helm/*/README.md")
    for path in ROOT.glob(pattern)
)
DECISIONS = sorted(path for path in ROOT.glob("docs/decisions/*.md") if path.name != "README.md")
SETTINGS: dict[str, type[BaseModel]] = {
    "TARGET": TargetSettings,
    "DRAFT": DraftSettings,
    "COORDINATOR": CoordinatorSettings,
    "GATEWAY": GatewaySettings,
}
PACKAGES = ("coordinator", "draft_service", "gateway", "specdec", "target_service")
SOURCES = (*PACKAGES, "bench", "deploy", "helm", "models", "proto", "tests", "vllm_plugin")
NAMING = {".py", ".proto", ".cpp", ".h", ".sh", ".yaml", ".yml", ".json"}
_CODE_BLOCK = re.compile(r"(?ms)^```.*?^```")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_METRIC = re.compile(r"\bspecdec_(?:coordinator|target|draft|gateway)_[a-z0-9_]*[a-z0-9]\b(?!_)")
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_PAGE = re.compile(r"\bdocs/[a-z_/]+\.md\b")
_VARIABLE = re.compile(r"\bSPECDEC_(TARGET|DRAFT|COORDINATOR|GATEWAY)_([A-Z0-9_]*[A-Z0-9])\b")
_EVENTS = re.compile(
    r"\*(?:coordinator|target|draft|gateway|server|service)\*: (`[a-z_]+`(?:, (?:then |or )?`[a-z_]+`)*)"
)


def anchors(path: Path) -> set[str]:
    """The sections of a page, as GitHub and GitLab name them."""
    titles = re.findall(r"(?m)^#+ (.+)$", _CODE_BLOCK.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@for_each("page", PAGES)
def test_links_lead_to_pages_and_sections_that_exist(page: Path) -> None:
    for link in _LINK.findall(_CODE_BLOCK.sub("", page.read_text())):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@for_each("page", PAGES)
def test_tests_that_are_named_exist(page: Path) -> None:
    for path, name in _TEST.findall(page.read_text()):
        assert (ROOT / path).is_file(), path
        assert not name or re.search(rf"(?m)^(async )?def {name}\(", (ROOT / path).read_text()), name


@for_each("page", PAGES)
def test_metrics_that_are_named_are_exported(page: Path) -> None:
    known = {*exported_series(), *(name.removesuffix("_bucket") for name in exported_series())}
    assert set(_METRIC.findall(page.read_text())) <= known


@for_each("page", PAGES)
def test_variables_that_are_named_are_settings(page: Path) -> None:
    for service, name in _VARIABLE.findall(page.read_text()):
        is_service_link = name in ("SERVICE_HOST", "PORT")
        assert is_service_link or name == "CONFIG" or name.lower() in SETTINGS[service].model_fields, name


def test_pages_that_code_and_comments_name_exist() -> None:
    sources = (path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in NAMING)
    named = {(str(path.relative_to(ROOT)), page) for path in sources for page in _PAGE.findall(path.read_text())}
    assert len({page for _, page in named}) > 3
    assert [(path, page) for path, page in sorted(named) if not (ROOT / page).is_file()] == []


def test_files_and_names_of_the_ten_steps_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    steps = re.findall(r"(?m)^\| \d+ [^|]*\| `([^`]+)` \| `(?:\w+\.)?(\w+)`", text)
    assert len(steps) >= 10
    assert [step for step in steps if f"def {step[1]}(" not in (ROOT / step[0]).read_text()] == []
    files = re.findall(r"`((?:\w+/)+\w+(?:\.py)?)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []


@for_each("page", DECISIONS)
def test_decisions_are_dated_newest_first_and_listed(page: Path) -> None:
    headings = re.findall(r"(?m)^##+ (.+)$", page.read_text())
    days = [date.fromisoformat(heading.split(" ", 1)[0]) for heading in headings]
    assert days
    assert days == sorted(days, reverse=True)
    assert f"({page.name})" in (page.parent / "README.md").read_text()


@pytest.mark.parametrize("page", DECISIONS, ids=lambda path: path.name)
def test_a_decision_has_at_most_150_words(page: Path) -> None:
    records = [record.split() for record in re.split(r"(?m)^## ", page.read_text())[1:]]
    assert {" ".join(words[:9]): len(words) for words in records if len(words) > 150} == {}


def test_the_page_of_settings_is_current() -> None:
    written = subprocess.run(
        [sys.executable, ROOT / "docs" / "site" / "settings_page.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert written.returncode == 0, written.stderr
    assert (ROOT / "docs" / "settings.md").read_text() == written.stdout, "docs/settings.md is old: make settings-doc"


def test_events_that_troubleshooting_names_are_logged() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sources = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    named = {event for found in _EVENTS.findall(page) for event in re.findall(r"[a-z_]+", found)} - {"then", "or"}
    assert len(named) > 10
    assert {event for event in named if f'"{event}"' not in sources} == set()
