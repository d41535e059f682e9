"""How far, and where, a draft grows its trees."""

from __future__ import annotations

import pytest

from specdec.drafting.role.growth import GrowthPolicy

POLICY = GrowthPolicy(max_ahead_tokens=16, max_nodes=64, max_heads=4)


@pytest.mark.parametrize(
    ("depth", "path_score", "num_nodes", "grows"),
    [
        (0, 1.0, 0, True),
        (15, 0.9, 30, True),
        (16, 0.9, 30, False),
        (3, 0.019, 30, False),
        (3, 0.021, 30, True),
        (3, 0.9, 59, True),
        (3, 0.9, 60, False),
    ],
)
def test_a_leaf_grows_within_depth_hope_and_room(depth: int, path_score: float, num_nodes: int, grows: bool) -> None:
    assert POLICY.grows(depth, path_score, num_nodes) is grows


@pytest.mark.parametrize(("num_sessions", "branches"), [(0, 3), (1, 3), (2, 1), (4, 0), (50, 0)])
def test_sessions_share_the_heads_and_each_keeps_its_main_one(num_sessions: int, branches: int) -> None:
    assert POLICY.num_branches(num_sessions) == branches


def test_branches_start_at_the_likeliest_leaves_that_nobody_grows() -> None:
    scores = [0.7, 0.2, 0.5, 0.1, 0.03]
    closed = [False, False, False, False, False]
    assert POLICY.pick_branches(scores, taken={-1, 0}, is_closed=closed, num_free=2) == [2, 1]
    assert POLICY.pick_branches(scores, taken={-1, 0, 2}, is_closed=closed, num_free=9) == [1, 3]
    closed[1] = True
    assert POLICY.pick_branches(scores, taken={-1, 0, 2}, is_closed=closed, num_free=9) == [3]


def test_of_equal_leaves_the_first_guessed_comes_first() -> None:
    assert POLICY.pick_branches([0.4, 0.4], taken=(), is_closed=[False, False], num_free=1) == [0]


def test_a_proposal_waits_for_a_second_step() -> None:
    assert not POLICY.is_worth_sending(1)
    assert POLICY.is_worth_sending(2)


@pytest.mark.parametrize(("credit", "depth"), [(None, 16), (0, 1), (1, 3), (4, 9), (8, 16), (64, 16)])
def test_the_targets_credit_bounds_the_depth(credit: int | None, depth: int) -> None:
    assert POLICY.max_depth(credit) == depth
