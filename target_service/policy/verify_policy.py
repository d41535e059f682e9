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
    if weights is not None:
        path_scores = [[score * weight for score in own] for own, weight in zip(path_scores, weights, strict=True)]
    expected_tokens = float(len(path_scores) if weights is None else sum(weights))
    num_rows = len(path_scores) + num_other_rows
    is_stepped = bool(step_time.edges) and num_rows <= step_time.edges[-1]
    if not is_stepped and _all_pay(path_scores, limits, num_rows, expected_tokens, step_time):
        return [list(range(len(scores))) for scores in path_scores]
    ranked = sorted(
        ((score, -index, session) for session, scores in enumerate(path_scores) for index, score in enumerate(scores)),
        reverse=True,
    )
    if is_stepped:
        return _up_to_an_edge(ranked, limits, num_rows, expected_tokens, step_time)
    chosen: list[list[int]] = [[] for _ in path_scores]
    for score, negative_index, session in ranked:
        if len(chosen[session]) >= limits[session]:
            continue
        if not _pays(score, expected_tokens, num_rows, step_time):
            break
        chosen[session].append(-negative_index)
        expected_tokens += score
        num_rows += 1
    return [sorted(nodes) for nodes in chosen]


def _pays(score: float, expected_tokens: float, num_rows: int, step_time: StepTimeModel) -> bool:
    """Whether one more node raises the tokens per second of a step with these tokens and rows."""
    return score > 0 and score * step_time.predict(num_rows) >= expected_tokens * step_time.row_s


def _all_pay(
    path_scores: Sequence[Sequence[float]],
    limits: Sequence[int],
    num_rows: int,
    expected_tokens: float,
    step_time: StepTimeModel,
) -> bool:
    """Whether all nodes are picked: each node that pays raises the rate, so all pay if the last one does."""
    sizes = list(map(len, path_scores))
    if not any(sizes) or any(size > limit for size, limit in zip(sizes, limits, strict=True)):
        return not any(sizes)
    last = min(min(scores) for scores in path_scores if scores)
    return _pays(last, expected_tokens + sum(map(sum, path_scores)) - last, num_rows + sum(sizes) - 1, step_time)


def _up_to_an_edge(
    ranked: Sequence[tuple[float, int, int]],
    limits: Sequence[int],
    num_rows: int,
    expected_tokens: float,
    step_time: StepTimeModel,
) -> list[list[int]]:
    """The best-first nodes with the most tokens per second, never past the last edge: larger steps are slower.

    Up to an edge each node is free: only steps that reach one, and the largest, are compared.
    """
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
        if num_rows in step_time.edges and (rate := expected_tokens / step_time.predict(num_rows)) > best_rate:
            best_rate, num_best = rate, len(taken)
    if expected_tokens / step_time.predict(num_rows) > best_rate:
        num_best = len(taken)
    best: list[list[int]] = [[] for _ in limits]
    for session, node in taken[:num_best]:
        best[session].append(node)
    return [sorted(nodes) for nodes in best]
