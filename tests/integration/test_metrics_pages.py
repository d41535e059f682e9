"""The /metrics pages of live services: promtool finds no fault, and docs/metrics.md describes all that is there."""

from __future__ import annotations

import asyncio
import subprocess
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec import __version__
from specdec.client import Client
from specdec.commands.up.cluster import Cluster
from specdec.telemetry.catalogue import exported_series
from specdec.v1 import coordinator_pb2 as api

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROLES = ("coordinator", "target", "draft")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def pages(tiny_cluster: Cluster, tiny_metrics_ports: dict[str, int]) -> dict[str, str]:
    """The page of each service after a request with speculation and one without, at least."""
    asyncio.run(traffic(tiny_cluster))
    return {role: page_of(port) for role, port in tiny_metrics_ports.items()}


def test_promtool_finds_no_fault(pages: dict[str, str]) -> None:
    for role, page in pages.items():
        result = subprocess.run(
            ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert (result.returncode, result.stderr) == (0, ""), role


def test_every_series_is_documented_with_its_labels(pages: dict[str, str]) -> None:
    documented = exported_series()
    for page in pages.values():
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    assert sample.labels.keys() == documented[sample.name], sample.name


def test_each_service_says_what_it_runs(pages: dict[str, str]) -> None:
    assert {role: build_of(page) for role, page in pages.items()} == {role: (role, __version__) for role in ROLES}


async def traffic(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        for speculate in (True, False):
            body = api.GenerateRequest(prompt="Once upon a time")
            body.sampling.max_tokens, body.sampling.ignore_eos = 32, True
            body.speculation.enabled = speculate
            await client.complete(body)


def build_of(page: str) -> tuple[str, str]:
    """Service and version of specdec_build_info."""
    for family in text_string_to_metric_families(page):
        if family.name == "specdec_build_info":
            (sample,) = family.samples
            assert sample.value == 1
            return sample.labels["service"], sample.labels["version"]
    raise AssertionError("specdec_build_info is missing")


def page_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as page:
        return page.read().decode()
