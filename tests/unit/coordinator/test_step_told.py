"""Trees that targets tell of: what a working target says passes, anything else is named."""

from __future__ import annotations

from specdec.coordinator.sessions.step_told import tree_fault
from specdec.v1 import common_pb2 as pb
from tests.support.for_each import for_each

UINT32_MAX = 2**32 - 1


def tree(**changes: object) -> pb.StepTree:
    fields: dict[str, object] = {
        "token_ids": [5, 6, 7],
        "parents": [-1, 0, -1],
        "scores": b"\x01\x02\x03",
        "verified": [0, 1],
        "logprobs": [-0.5, -1.0],
        "accepted": [0, 1],
        "drafters": ["draft_model", "ngram"],
        "proposed_by": b"\x00\x01\x00",
        **changes,
    }
    return pb.StepTree(**fields)  # type: ignore[arg-type]


def test_a_tree_and_no_tree_pass() -> None:
    assert tree_fault(tree(), 10) is None
    assert tree_fault(pb.StepTree(), 10) is None
    assert tree_fault(tree(drafters=[], proposed_by=b""), 10) is None, "a target of the last release"


@for_each(
    "changes, why",
    [
        ({"token_ids": [5] * 65}, "65 nodes"),
        ({"parents": [-1, 0]}, "without a parent"),
        ({"scores": b""}, "and a score"),
        ({"token_ids": [5, 6, UINT32_MAX]}, "outside the vocabulary"),
        ({"parents": [-1, 1, -1]}, "before its parent"),
        ({"parents": [-1, -2, -1]}, "before its parent"),
        ({"parents": [-1, 2**31 - 1, -1]}, "before its parent"),
        ({"verified": [0, 0]}, "log-probability each"),
        ({"logprobs": [-0.5]}, "log-probability each"),
        ({"verified": [0, UINT32_MAX]}, "outside its tree"),
        ({"accepted": [1]}, "no path"),
        ({"accepted": [0, 2]}, "no path"),
        ({"accepted": [UINT32_MAX]}, "no path"),
        ({"accepted": [0, 0]}, "no path"),
        ({"proposed_by": b"\x00\x01"}, "without a drafter"),
        ({"proposed_by": b"\x00\x01\x02"}, "without a drafter"),
        ({"proposed_by": b""}, "without a drafter"),
        ({"drafters": []}, "without a drafter"),
        ({"drafters": ["draft_model", "x" * 65]}, "without a drafter"),
        ({"drafters": ["x"] * 65}, "without a drafter"),
    ],
)
def test_what_is_no_tree_is_named(changes: dict[str, object], why: str) -> None:
    fault = tree_fault(tree(**changes), 10)
    assert fault is not None and why in fault
