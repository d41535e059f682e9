"""The cost of a drafter's window: rows of the target's step that are computed however unlikely.

Other nodes are verified only while their rows pay (`policy/verify_policy.py`). A window is always computed, so its
drafter is charged with its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from specdec.target_service.policy.step_time import StepTimeModel
from specdec.target_service.proposals.session_drafters import DrafterInSession
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import TargetSession
from specdec.target_service.tree.speculation_tree import SpeculationTree


def charge_windows(
    decisions: Sequence[Decision],
    num_rows: int,
    step_time: StepTimeModel,
    drafters_of: Callable[[TargetSession], Iterable[DrafterInSession]],
) -> None:
    """Charge drafters that were asked for a step with the rows of their windows in it.

    To be called before the decisions are committed.

    Args:
        decisions: decisions of the step.
        num_rows: all rows of the step.
        step_time: predicts the step's time from its rows.
        drafters_of: the drafters of a session.
    """
    if not any(decision.candidate.session.tree.has_window for decision in decisions):
        return
    owed: list[tuple[DrafterInSession, int]] = []
    for decision in decisions:
        candidate = decision.candidate
        own = window_rows(candidate.session.tree, candidate.chosen[: candidate.num_nodes])
        owed += [(drafter, own[drafter.name]) for drafter in drafters_of(candidate.session) if own[drafter.name]]
    each_tokens = row_tokens(num_rows, sum(rows for _, rows in owed), len(decisions), step_time)
    for drafter, rows in owed:
        if drafter.step is not None:
            drafter.step.window_tokens = rows * each_tokens


def window_rows(tree: SpeculationTree, chosen: Iterable[int]) -> Counter[str]:
    """Number of chosen nodes, by drafter, that only its window has: no source gave them a score."""
    nodes = (tree.nodes[node] for node in chosen)
    return Counter(node.source for node in nodes if node.is_window and not node.score and not node.others)


def row_tokens(num_rows: int, num_window_rows: int, num_sessions: int, step_time: StepTimeModel) -> float:
    """Cost of one of a step's window rows, in tokens that its sessions could have decoded plainly meanwhile.

    The window rows share the time that they add to the step; where steps are padded that may be 0.
    """
    if not num_window_rows:
        return 0.0
    longer_s = step_time.predict(num_rows) - step_time.predict(num_rows - num_window_rows)
    return longer_s / num_window_rows * num_sessions / step_time.predict(num_sessions)
