"""Tokens that the target has drawn at each row of a step, for drafters that use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from specdec.drafting.interface import DrawReader
from specdec.target_service.proposals.deadline import Deadline, Overdue
from specdec.target_service.proposals.session_drafters import DrafterInSession
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import TargetSession


def tell_drawn(
    decisions: Sequence[Decision],
    readers: Collection[str],
    drafters_of: Callable[[TargetSession], Iterable[DrafterInSession]],
    deadline: Deadline,
) -> list[tuple[str, BaseException]]:
    """Report drawn tokens to the drafters in `readers` that were asked for the step.

    Returns the names of drafters that failed, with their errors.
    """
    failed: dict[str, BaseException] = {}
    for decision in decisions if readers else ():
        for drafter in drafters_of(decision.candidate.session):
            if drafter.name not in readers or drafter.name in failed or drafter.step is None:
                continue
            reader: DrawReader = drafter.proposer  # type: ignore[assignment]
            try:
                with deadline:
                    reader.drawn(_drawn(decision))
            except (Exception, Overdue) as error:
                failed[drafter.name] = error
    return list(failed.items())


def _drawn(decision: Decision) -> dict[tuple[int, ...], int]:
    """The drawn token after each path of uncommitted tokens; rows without a possible token are left out."""
    tree, num_nodes = decision.candidate.tree, decision.candidate.num_nodes
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[:num_nodes], tree.parents, strict=False):
        paths.append((*paths[parent + 1], token))
    return {path: token for path, token in zip(paths, decision.tokens, strict=True) if token is not None}
