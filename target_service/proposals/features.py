"""Hidden states that a step computed of tokens that stay, for heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from specdec.drafting.heads.session import Features
from specdec.engine.outputs import ItemOutput, StepOutput
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import TargetSession


@dataclass(frozen=True, slots=True)
class Computed:
    """Committed tokens of one session, with their hidden states at all layers of the step's tap."""

    session: TargetSession
    start: int
    """Position of the first token."""
    states: torch.Tensor
    """[n, layers of the tap, hidden size]; no later step writes to it."""
    next_ids: list[int]
    """[n], the token after each."""

    def features(self, columns: Sequence[int]) -> Features:
        """Features for a head that reads the layers `columns` of the tap."""
        whole = list(columns) == list(range(self.states.shape[1]))
        states = self.states if whole else self.states[:, list(columns)]
        return Features(self.start, states, self.next_ids)


def computed(
    output: StepOutput, decisions: Sequence[Decision], session_of: Mapping[int, TargetSession]
) -> Iterator[Computed]:
    """Hidden states of all tokens of prompt chunks, and, per decision, of the last committed token and accepted nodes.

    To be called before the decisions are committed. Rejected nodes and choices that end are left out.

    Args:
        output: output of the step; without hidden states nothing is yielded.
        decisions: decisions of the step.
        session_of: sessions by the id of their sequence.
    """
    if output.hidden is None:
        return
    by_root: dict[int, ItemOutput] = {}
    for item in output.items:
        if item.completes:
            by_root[item.rows.stop - item.tree_nodes - 1] = item
        elif (session := session_of.get(item.seq.seq_id)) is not None and session.max_nodes > 0:
            first, end = item.start, item.start + item.num_new_tokens
            states = _kept(output.hidden, item.batch_rows)
            yield Computed(session, first, states, item.seq.token_ids[first + 1 : end + 1])
    for decision in decisions:
        candidate, walk = decision.candidate, decision.walk
        session, root = candidate.session, by_root.get(candidate.root_row)
        if root is None or walk.finish_reason or session.max_nodes == 0 or root.num_new_tokens == 0:
            continue
        start = root.start if root.seq is session.seq else session.num_tokens - 1  # a fork has its parent's last row
        first_node = root.batch_rows.start + root.num_new_tokens
        first_row, num_nodes = first_node - (session.num_tokens - start), len(walk.path)
        if not num_nodes or walk.path[-1] == num_nodes - 1:  # the accepted nodes are the tree's first rows
            states = _kept(output.hidden, slice(first_row, first_node + num_nodes))
        else:
            states = output.hidden[[*range(first_row, first_node), *(first_node + node for node in walk.path)]]
        next_ids = [*session.token_ids[start + 1 :], *walk.token_ids]
        yield Computed(session, start, states, next_ids[: len(states)])


def _kept(hidden: torch.Tensor, rows: slice) -> torch.Tensor:
    """States that no later step overwrites: a captured graph writes to the same tensor again, so they are copied."""
    return hidden[rows] if hidden.device.type == "cpu" else hidden[rows].clone()
