"""What tables say of who drafts."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from specdec.commands.debug.debug_view import drafters_table
from specdec.commands.debug.steps import Explained, ExplainedNode, ExplainedStep, State, Times
from specdec.commands.views.tables import model_table
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api


def shown(table: Table) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return [line.split() for line in captured.get().splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("info", "told"),
    [
        (api.GetModelInfoResponse(), "none: decoding is plain"),
        (api.GetModelInfoResponse(drafters=["ngram"]), "none: the target's own drafters propose"),
        (api.GetModelInfoResponse(draft=pb.ModelIdentity(name="small", num_parameters=900)), "small (900 parameters)"),
    ],
)
def test_decoding_is_called_plain_only_where_nothing_drafts(info: api.GetModelInfoResponse, told: str) -> None:
    assert ["draft", *told.split()] in shown(model_table(info))


def node(drafter: str, state: State) -> ExplainedNode:
    known = {"token_id": 1, "text": "a", "parent": -1, "depth": 1, "score": 0.5, "rank": 1, "target_prob": None}
    return ExplainedNode(drafter=drafter, state=state, why="", **known)  # type: ignore[arg-type]


def test_each_drafter_is_told_with_what_it_cost_and_brought_for_that() -> None:
    nodes = [node("ngram", State.ACCEPTED), node("ngram", State.REJECTED), node("draft_model", State.UNVERIFIED)]
    times = Times(at_ms=1, step_ms=1, hold_off_ms=0, elsewhere_ms=0, draft_ms=0)
    step = ExplainedStep(number=1, start=0, tokens=[], nodes=nodes, times=times, is_suspended=False)
    rows = shown(drafters_table(Explained(steps=[step]), {"ngram": 0.5}))
    assert rows[-2:] == [["draft_model", "1", "0", "0", "-", "-"], ["ngram", "2", "2", "1", "0.5", "2.00"]]
