"""Which proposed nodes a step verifies: pure functions over estimated acceptance and a step-time model.

A step over ``S`` sessions that verifies the node set ``V`` commits ``S + sum of path probabilities in V`` tokens on
average and takes ``T(S + |V|)``. Nodes are added best first while that raises tokens per second, each token weighted by
its worth (`urgency.py`). A node's path probability is at most its parent's, so the best-first order never takes a node
before its parent. With many sessions ``T`` is steep and the rule shrinks to plain decoding by itself. Where steps are
padded, ``T`` is a staircase: the number of nodes is the one with the most tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.target_service.policy.step_time import StepTimeModel


def select_nodes(
    path_scores: Sequence[Sequence[float]],
    limits: Sequence[int],
    num_other_rows: int,
    step_time: StepTimeModel,
    weights: Sequence[float] | None = None,
) -> list[list[int]]:
    """Pick the nodes to verify, per session, in ascending order.

    Args:
        path_scores: per session, the probability that each node and all its ancestors are accepted.
        limits: per session, the most nodes to verify in this step.
        num_other_rows: rows of the step besides those of these sessions.
        step_time: predicts the step's time from its rows.
        weights: worth of a token of each session; None: 1 for each.
    """
    if weights is None:
        weights = [1.0] * len(path_scores)
    ranked = sorted(
        (
            (score * weights[session], -index, session)
            for session, scores in enumerate(path_scores)
            for index, score in enumerate(scores)
        ),
        reverse=True,
    )
    chosen: list[list[int]] = [[] for _ in path_scores]
    expected_tokens = float(sum(weights))
    num_rows = len(path_scores) + num_other_rows
    if step_time.edges and num_rows <= step_time.edges[-1]:
        return _up_to_an_edge(ranked, limits, num_rows, expected_tokens, step_time)
    for score, negative_index, session in ranked:
        if len(chosen[session]) >= limits[session]:
            continue
        rate = expected_tokens / step_time.predict(num_rows)
        if score <= 0 or score < rate * step_time.row_s:
            break
        chosen[session].append(-negative_index)
        expected_tokens += score
        num_rows += 1
    return [sorted(nodes) for nodes in chosen]


def _up_to_an_edge(
    ranked: Sequence[tuple[float, int, int]],
    limits: Sequence[int],
    num_rows: int,
    expected_tokens: float,
    step_time: StepTimeModel,
) -> list[list[int]]:
    """The best-first nodes with the most tokens per second, never past the last edge: larger steps are slower."""
    chosen: list[list[int]] = [[] for _ in limits]
    taken: list[tuple[int, int]] = []
    best_rate, num_best = expected_tokens / step_time.predict(num_rows), 0
    for score, negative_index, session in ranked:
        if score <= 0 or num_rows == step_time.edges[-1]:
            break
        if len(chosen[session]) >= limits[session]:
            continue
        chosen[session].append(-negative_index)
        taken.append((session, -negative_index))
        expected_tokens += score
        num_rows += 1
        if (rate := expected_tokens / step_time.predict(num_rows)) > best_rate:
            best_rate, num_best = rate, len(taken)
    best: list[list[int]] = [[] for _ in limits]
    for session, node in taken[:num_best]:
        best[session].append(node)
    return [sorted(nodes) for nodes in best]
