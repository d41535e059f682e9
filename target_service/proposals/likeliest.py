"""What the target finds likeliest after each verified token, for drafters that want to know."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from specdec.drafting.interface import Context, Drafter
from specdec.engine.tree import ROOT
from specdec.target_service.decide import Decision
from specdec.target_service.proposals.deadline import Deadline, Overdue
from specdec.target_service.proposals.part import DrafterPart, Known, PanelRecorder
from specdec.wire.sampling_params import VerifyMode


def tell_likeliest(
    decisions: Sequence[Decision],
    logits: torch.Tensor,
    drafters: Mapping[str, Drafter],
    known: Mapping[str, Known],
    deadline: Deadline,
    recorder: PanelRecorder,
) -> list[tuple[str, BaseException]]:
    """Tell those that were asked for the step; what it takes is part of what asking them costs.

    In rejection mode only rows on the committed path count: tokens that were drawn and refused must leave no trace
    (docs/rejection.md).

    Args:
        decisions: not committed yet.
        logits: of all rows of the step: rows x vocabulary, without padding.
        drafters: by name.
        known: sessions by their ids.
        deadline: of a call.
        recorder: is told what each took.

    Returns those that failed, with their errors.
    """
    num_top = max((drafter.capabilities.num_target_top for drafter in drafters.values()), default=0)
    if num_top == 0:
        return []
    began_s = time.monotonic()
    rows: list[int] = []
    shares: list[tuple[DrafterPart, Context, list[int]]] = []
    for decision in decisions:
        candidate = decision.candidate
        session = known.get(candidate.session.session_id)
        part = None if session is None else next((part for part in session.parts if _reads(part, drafters)), None)
        if session is None or part is None:
            continue
        is_rejection = candidate.session.mode is VerifyMode.REJECTION
        nodes = decision.walk.rows if is_rejection else range(ROOT, candidate.num_nodes)
        last = candidate.session.token_ids[-1]
        token_ids = [last if node == ROOT else candidate.tree.token_ids[node] for node in nodes]
        shares.append((part, session.context, token_ids))
        rows += [candidate.root_row + 1 + node for node in nodes]
    if not rows:
        return []
    needed = logits if rows == list(range(len(logits))) else logits[rows]
    top_ids = needed.topk(min(num_top, needed.shape[1]), dim=1).indices.tolist()
    failed: dict[str, BaseException] = {}
    first = 0
    for part, context, token_ids in shares:
        best = top_ids[first : first + len(token_ids)]
        first += len(token_ids)
        if part.name not in failed:
            try:
                with deadline:
                    drafters[part.name].verified(context, token_ids, best)
            except (Exception, Overdue) as error:
                failed[part.name] = error
    each_s = (time.monotonic() - began_s) / len(shares)
    for part, _, _ in shares:
        if part.step is not None:
            part.step.elapsed_s += each_s
            recorder.asked(part.name, 0, each_s)
    return list(failed.items())


def _reads(part: DrafterPart, drafters: Mapping[str, Drafter]) -> bool:
    """Whether a part wants to know what the target found: it does where it was asked for the step."""
    return part.step is not None and drafters[part.name].capabilities.num_target_top > 0
