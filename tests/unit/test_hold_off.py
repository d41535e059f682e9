"""How long a step waits for a draft."""

from __future__ import annotations

import pytest

from target_service.hold_off import DraftLatency, expected_tokens, nodes_to_wait_for


def wanted(acceptance: float, first_s: float, node_s: float, base_s: float, row_s: float = 0.0, limit: int = 8) -> int:
    return nodes_to_wait_for(acceptance, DraftLatency(first_s, node_s), lambda rows: base_s + row_s * rows, limit)


@pytest.mark.parametrize(
    ("acceptance", "num_nodes", "tokens"), [(0.0, 8, 1.0), (1.0, 8, 9.0), (0.5, 2, 1.75), (0.7, 0, 1.0)]
)
def test_expected_tokens_of_a_chain(acceptance: float, num_nodes: int, tokens: float) -> None:
    assert expected_tokens(acceptance, num_nodes) == pytest.approx(tokens)


def test_a_slow_target_waits_for_a_fast_and_good_draft() -> None:
    assert wanted(0.8, first_s=0.002, node_s=0.001, base_s=0.1) == 8


def test_a_fast_target_does_not_wait_for_a_slow_draft() -> None:
    assert wanted(0.8, first_s=0.050, node_s=0.010, base_s=0.005) == 0


def test_nobody_waits_for_a_draft_that_is_always_wrong() -> None:
    assert wanted(0.0, first_s=0.001, node_s=0.001, base_s=0.1) == 0


def test_no_more_nodes_are_wanted_than_can_be_verified() -> None:
    assert wanted(1.0, first_s=0.001, node_s=0.0001, base_s=0.1, limit=3) == 3
    assert wanted(1.0, first_s=0.001, node_s=0.0001, base_s=0.1, limit=0) == 0


def test_a_better_draft_is_worth_waiting_longer_for() -> None:
    counts = [wanted(a / 10, first_s=0.002, node_s=0.004, base_s=0.020) for a in range(11)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 8


def test_dear_rows_shorten_the_wait() -> None:
    cheap = wanted(0.8, first_s=0.002, node_s=0.001, base_s=0.020)
    dear = wanted(0.8, first_s=0.002, node_s=0.001, base_s=0.020, row_s=0.010)
    assert dear < cheap


def test_a_draft_that_takes_no_time_does_not_divide_by_zero() -> None:
    assert wanted(0.9, first_s=0.0, node_s=0.0, base_s=0.01) in range(9)


def test_latencies_are_moving_averages() -> None:
    latency = DraftLatency(first_s=0.010, node_s=0.010, weight=0.5)
    latency.observe_first(0.020)
    latency.observe_node(0.0)
    assert (latency.first_s, latency.node_s) == (0.015, 0.005)
