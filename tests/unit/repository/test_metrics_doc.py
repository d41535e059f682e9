"""docs/metrics.md says what the code exports, and every query in it names only that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from specdec.coordinator.links.link_events import LinkState
from specdec.telemetry.catalogue import catalogue, exported_series, render
from specdec.telemetry.registry import MetricDoc
from tests.support.for_each import for_each

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
ADDED_BY_PROMETHEUS = {"job", "instance"}
DOCS = [doc for docs in catalogue().values() for doc in docs]


def test_the_page_is_up_to_date() -> None:
    command = "python -m specdec.telemetry.catalogue > docs/metrics.md"
    assert PAGE.read_text() == render(), f"docs/metrics.md is out of date; write it again with: {command}"


def test_names_are_unique() -> None:
    names = [doc.name for doc in DOCS]
    assert len(names) == len(set(names))


@for_each("doc", DOCS)
def test_a_query_names_its_metric_and_nothing_that_is_not_exported(doc: MetricDoc) -> None:
    assert unknown_names(doc.promql) == set()
    assert doc.series.keys() & {selector.name for selector in selectors_of(promql_parser.parse(doc.promql))}


@for_each("doc", DOCS)
def test_names_and_texts_follow_the_conventions(doc: MetricDoc) -> None:
    assert doc.name.endswith("_total") == (doc.type == "counter")
    assert not doc.name.endswith(("_ms", "_us", "_count", "_sum", "_bucket"))
    assert doc.text.endswith(".")
    assert all(values for values in doc.labels.values())


def test_every_state_of_a_replica_is_listed() -> None:
    (states,) = (doc.labels["state"] for doc in DOCS if doc.name == "specdec_coordinator_replicas")
    assert states == ", ".join(LinkState)


@pytest.mark.parametrize(
    ("promql", "unknown"),
    [
        ("rate(specdec_target_token_total[5m])", {"specdec_target_token_total"}),
        ('sum(specdec_target_steps_total{type="verify"})', {"type"}),
        ("sum by (role, pod) (specdec_coordinator_sessions)", {"pod"}),
        ("sum by (le) (rate(specdec_target_step_seconds[5m]))", {"specdec_target_step_seconds", "le"}),
        ("specdec_target_sessions / on(node) specdec_target_kv_blocks", {"node"}),
        ("max_over_time(sum(specdec_draft_session)[5m:1m])", {"specdec_draft_session"}),
    ],
)
def test_a_query_with_an_unknown_metric_or_label_is_found(promql: str, unknown: set[str]) -> None:
    assert unknown_names(promql) == unknown


def unknown_names(promql: str) -> set[str]:
    """Metrics and labels in a query that no service exports. Raises ValueError when it does not parse."""
    exported = exported_series()
    expression = promql_parser.parse(promql)
    unknown: set[str] = set()
    labels = set(ADDED_BY_PROMETHEUS)
    for selector in selectors_of(expression):
        own = exported.get(selector.name)
        if own is None:
            unknown.add(selector.name)
            continue
        labels |= own
        unknown |= {matcher.name for matcher in selector.matchers.matchers} - own - ADDED_BY_PROMETHEUS
    for node in nodes_of(expression):
        modifier = getattr(node, "modifier", None)
        matching = getattr(modifier, "matching", None) or modifier
        unknown |= {*getattr(matching, "labels", ()), *(getattr(modifier, "group_labels", None) or ())} - labels
    return unknown


def selectors_of(expression: Any) -> Iterator[promql_parser.VectorSelector]:
    return (node for node in nodes_of(expression) if isinstance(node, promql_parser.VectorSelector))


def nodes_of(node: Any) -> Iterator[Any]:
    """A node of a parsed query and all below it."""
    yield node
    below = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for child in [*below, *getattr(node, "args", ())]:
        if child is not None:
            yield from nodes_of(child)
