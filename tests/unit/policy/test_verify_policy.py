"""Which nodes a step verifies: tables over scores, limits and step-time models."""

from __future__ import annotations

import random

import pytest

from specdec.engine.tree import TokenTree
from specdec.target_service.policy.acceptance import Acceptance, OwnRecord, SourceRecord
from specdec.target_service.policy.step_time import StepTimeModel
from specdec.target_service.policy.urgency import urgency
from specdec.target_service.policy.verify_policy import select_nodes


def machine(base_s: float, row_s: float) -> StepTimeModel:
    return StepTimeModel(base_s=base_s, row_s=row_s)


FREE = machine(0.01, 0.0)
GPU_LIKE = machine(0.01, 0.0005)
COMPUTE_BOUND = machine(0.0, 0.01)


@pytest.mark.parametrize(
    ("scores", "limits", "model", "chosen"),
    [
        ([], [], FREE, []),
        ([[]], [8], FREE, [[]]),
        ([[0.9, 0.8, 0.7]], [8], FREE, [[0, 1, 2]]),
        ([[0.9, 0.8, 0.7]], [2], FREE, [[0, 1]]),
        ([[0.9, 0.8, 0.7]], [0], FREE, [[]]),
        # A second branch with a better path goes before a deep node of the first.
        ([[0.6, 0.2, 0.5]], [2], FREE, [[0, 2]]),
        # Among equals a parent, which comes earlier, goes first.
        ([[0.5, 0.5, 0.5]], [2], FREE, [[0, 1]]),
        # A row costs as much as a step: only certain nodes pay.
        ([[0.9, 0.8]], [8], COMPUTE_BOUND, [[]]),
        # Limits are each session's own.
        ([[0.9, 0.8], [0.7, 0.6]], [1, 2], FREE, [[0], [0, 1]]),
    ],
)
def test_nodes_are_taken_best_first_while_they_pay(
    scores: list[list[float]], limits: list[int], model: StepTimeModel, chosen: list[list[int]]
) -> None:
    assert select_nodes(scores, limits, 0, model) == chosen


def test_the_better_session_gets_the_rows_that_pay() -> None:
    good, bad = [0.9, 0.81, 0.73], [0.03, 0.001, 0.0001]
    assert select_nodes([good, bad], [8, 8], 0, GPU_LIKE) == [[0, 1, 2], []]


def test_under_load_verification_shrinks_to_plain_decoding() -> None:
    scores = [0.6, 0.36, 0.22, 0.13]
    alone = select_nodes([scores], [8], 0, GPU_LIKE)[0]
    crowded = select_nodes([scores] * 64, [8] * 64, 0, GPU_LIKE)
    assert len(alone) == 4
    assert sum(map(len, crowded)) < 64 * 4
    assert select_nodes([scores] * 64, [8] * 64, 0, machine(0.001, 0.01)) == [[]] * 64


def test_rows_of_prefill_in_the_step_make_nodes_cheaper_by_comparison() -> None:
    scores = [[0.05]]
    assert select_nodes(scores, [8], 0, GPU_LIKE) == [[0]]
    assert select_nodes([[0.04]], [8], 0, GPU_LIKE) == [[]]
    assert select_nodes([[0.04]], [8], 100, GPU_LIKE) == [[0]]


@pytest.mark.parametrize("model", [FREE, GPU_LIKE, machine(0.001, 0.002)])
def test_chosen_nodes_are_closed_under_parents(model: StepTimeModel) -> None:
    parents = [-1, 0, 0, 1, 2, 4, 3]
    path: list[float] = []
    for node, rate in enumerate([0.8, 0.5, 0.5, 1.0, 0.9, 0.1, 1.0]):
        path.append(rate * (path[parents[node]] if parents[node] >= 0 else 1.0))
    for limit in range(8):
        chosen = select_nodes([path], [limit], 0, model)[0]
        assert len(chosen) <= limit
        assert all(parents[node] in (-1, *chosen) for node in chosen)


EDGES = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("scores", "limits", "model", "chosen"),
    [
        # Rows to the edge cost nothing: no score is too low for them but 0.
        ([[0.9, 0.3, 0.01]], [8], StepTimeModel(0.01, 0.0005, edges=EDGES), [[0, 1, 2]]),
        ([[0.9, 0.3, 0.0]], [8], StepTimeModel(0.01, 0.0005, edges=EDGES), [[0, 1]]),
        # Past the edge four rows are paid for, and what is to fill them is not worth that.
        ([[0.9, 0.8, 0.7, 0.1]], [8], StepTimeModel(0.01, 0.002, edges=EDGES), [[0, 1, 2]]),
        # One node alone would not pay for the next edge, four do.
        ([[0.9, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6]], [8], StepTimeModel(0.01, 0.002, edges=EDGES), [[0, 1, 2, 3, 4, 5, 6]]),
        # Sessions fill an edge together, the better one first.
        ([[0.9, 0.2], [0.8]], [8, 8], StepTimeModel(0.01, 0.01, edges=EDGES), [[0], [0]]),
        # A limit is kept, free or not.
        ([[0.9, 0.8, 0.7]], [1], StepTimeModel(0.01, 0.0, edges=EDGES), [[0]]),
        # Behind the last edge steps are others: none is made one for the sake of nodes.
        ([[1.0] * 9], [20], StepTimeModel(0.01, 0.0, edges=EDGES), [[0, 1, 2, 3, 4, 5, 6]]),
        ([[1.0]] * 9, [20] * 9, StepTimeModel(0.01, 0.0, edges=EDGES), [[0]] * 9),
        # Dear rows: plain decoding.
        ([[0.5, 0.1]], [8], StepTimeModel(0.0, 0.01, edges=EDGES), [[]]),
    ],
)
def test_where_steps_are_padded_nodes_fill_them_to_the_edge_that_pays_best(
    scores: list[list[float]], limits: list[int], model: StepTimeModel, chosen: list[list[int]]
) -> None:
    assert select_nodes(scores, limits, 0, model) == chosen


def test_a_record_begins_with_the_scores_themselves() -> None:
    record = SourceRecord()
    assert [record.rate(score, 1, None) for score in (0.95, 0.0, 1.0)] == pytest.approx([0.95, 0.0, 1.0])


@pytest.mark.parametrize("truth", [0.0, 0.3, 1.0])
def test_a_record_learns_the_rate_of_a_score_and_leaves_others_alone(truth: float) -> None:
    record = SourceRecord()
    for i in range(1000):
        record.observe(0.9, 1, i % 10 < truth * 10, None)
    assert record.rate(0.9, 1, None) == pytest.approx(truth, abs=0.05)
    assert record.rate(0.3, 1, None) == pytest.approx(0.3)
    assert record.rate(0.9, 2, None) == pytest.approx(0.9)


def test_a_record_follows_a_change() -> None:
    record = SourceRecord()
    for accepted in [True] * 1000 + [False] * 1000:
        record.observe(0.6, 1, accepted, None)
    assert record.rate(0.6, 1, None) < 0.03


@pytest.mark.parametrize("truth", [0.0, 0.5, 1.0])
def test_the_rate_per_depth_follows_how_often_a_walk_goes_on(truth: float) -> None:
    acceptance = Acceptance()
    assert acceptance.depth_rate == pytest.approx(0.5)
    for i in range(2000):
        acceptance.observe_depth(i % 10 < truth * 10)
    assert acceptance.depth_rate == pytest.approx(truth, abs=0.06)


def test_a_request_that_is_behind_its_wish_gets_rows_before_others() -> None:
    scores, limits = [[0.5, 0.25], [0.5, 0.25]], [2, 2]
    dear = machine(0.01, 0.0025)
    assert select_nodes(scores, limits, 0, dear) == [[0], [0]]
    assert select_nodes(scores, limits, 0, dear, [16.0, 0.125]) == [[0, 1], []]
    assert select_nodes(scores, limits, 0, dear, [1.0, 1.0]) == select_nodes(scores, limits, 0, dear)


def test_what_a_token_is_worth_follows_the_wish() -> None:
    assert urgency(0.0, 5.0, 1) == 1.0
    assert urgency(0.01, 0.0, 0) == 1.0
    assert urgency(0.01, 1.0, 100) == pytest.approx(1.0)
    assert urgency(0.01, 2.0, 100) > 3
    assert urgency(0.01, 0.5, 100) < 0.4
    assert urgency(1e-6, 1e6, 1) == 16.0
    assert urgency(4294.0, 0.0, 10_000_000) == 1 / 16


@pytest.mark.parametrize("has_own", [True, False])
def test_the_scores_of_a_trees_paths_are_products_of_its_nodes_rates(has_own: bool) -> None:
    record, own = SourceRecord(), OwnRecord() if has_own else None
    draws = random.Random(5)
    for _ in range(400):
        record.observe(draws.random(), draws.randint(1, 64), draws.random() < 0.6, own)
    tree = TokenTree(range(64), [draws.randint(-1, node - 1) for node in range(64)])
    scores = [draws.randint(0, 255) / 255 for _ in range(64)]
    products: list[float] = []
    for score, parent, depth in zip(scores, tree.parents, tree.depths, strict=True):
        rate = record.rate(score, depth, own) if depth <= 3 else 0.0
        products.append(rate * products[parent] if parent >= 0 else rate)
    assert record.path_scores(scores, tree, own, 3) == products
