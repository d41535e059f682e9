"""What a drafter's window costs: rows of the target's own step that nobody chose for being likely.

Guesses are verified while their rows are worth it (`policy/verify_policy.py`), so they pay for themselves. A window is
computed whatever it brings: the drafter that asks for it is charged with its time.
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
    """Charge drafters that were asked for a step of `num_rows` rows with their windows' rows in it.

    To be called before the decisions are committed. `drafters_of` has the drafters of a session.
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
    """Number of chosen nodes, by drafter, that are there for its window alone."""
    nodes = (tree.nodes[node] for node in chosen)
    return Counter(node.source for node in nodes if node.is_window and not node.score and not node.others)


def row_tokens(num_rows: int, num_window_rows: int, num_sessions: int, step_time: StepTimeModel) -> float:
    """What each of a step's `num_window_rows` cost: tokens that its sessions could have decoded plainly meanwhile.

    All of them share what they made the step longer by: where steps are padded that may be nothing.
    """
    if not num_window_rows:
        return 0.0
    longer_s = step_time.predict(num_rows) - step_time.predict(num_rows - num_window_rows)
    return longer_s / num_window_rows * num_sessions / step_time.predict(num_sessions)
