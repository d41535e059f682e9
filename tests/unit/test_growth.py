"""How far a draft goes ahead."""

from __future__ import annotations

import pytest

from draft_service.growth import GrowthPolicy


@pytest.mark.parametrize(
    ("num_ahead", "path_score", "credit", "wants"),
    [
        (0, 1.0, None, True),
        (15, 0.9, None, True),
        (16, 0.9, None, False),
        (3, 0.019, None, False),
        (3, 0.021, None, True),
        (8, 0.9, 4, True),
        (9, 0.9, 4, False),
        (0, 1.0, 0, True),
        (1, 1.0, 0, False),
        (16, 1.0, 64, False),
    ],
)
def test_growth_stops_at_the_limit_the_credit_and_hopeless_paths(
    num_ahead: int, path_score: float, credit: int | None, wants: bool
) -> None:
    assert GrowthPolicy(16).wants_more(num_ahead, path_score, credit) is wants
