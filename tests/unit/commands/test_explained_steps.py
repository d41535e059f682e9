"""What an explanation says of each token, and that its page holds whatever a model says as text."""

from __future__ import annotations

import base64
import hashlib
import math
from html.parser import HTMLParser

import pytest

from specdec.client import CompletedChoice
from specdec.commands.debug.page import page_of
from specdec.commands.debug.steps import Explained, State, explain, token_ids_of
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

TEXTS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}
TREE = pb.StepTree(
    token_ids=[1, 2, 3, 4, 5],
    parents=[-1, 0, 0, 1, -1],
    scores=bytes([204, 102, 51, 255, 25]),
    verified=[0, 1, 2, 3],
    logprobs=[math.log(0.5), math.log(0.25), math.log(0.125), -1.0],
    accepted=[0, 2],
)


def choice_of(*tokens: tuple[int, float], tree: pb.StepTree = TREE) -> CompletedChoice:
    """One plain step and one with a tree, which commits these tokens of some probability."""
    choice = CompletedChoice()
    choice.tokens = [
        api.OutputToken(
            id=token,
            text=TEXTS.get(token, ""),
            origin=pb.ORIGIN_DRAFT,
            drafter="suffix",
            logprobs=pb.PositionLogprobs(logprob=math.log(prob)),
        )
        for token, prob in ((5, 1.0), *tokens)
    ]
    choice.steps = [
        api.DecodingStep(start=0, num_tokens=1, at_us=10_000, step_us=7_000),
        api.DecodingStep(
            start=1,
            num_tokens=len(tokens),
            tree=tree,
            at_us=14_000,
            step_us=2_000,
            hold_off_us=500,
            draft_us=900,
        ),
    ]
    return choice


def explained() -> Explained:
    return explain(choice_of((1, 0.5), (3, 0.125), (4, 0.75)), TEXTS)


def test_each_node_has_its_state_and_rank_and_the_reason() -> None:
    nodes = explained().steps[1].nodes
    assert [node.state for node in nodes] == [
        State.ACCEPTED, State.REJECTED, State.ACCEPTED, State.REJECTED, State.UNVERIFIED
    ]  # fmt: skip
    assert [node.rank for node in nodes] == [1, 1, 2, 1, 2]
    assert [node.depth for node in nodes] == [1, 2, 2, 3, 1]
    assert [node.drafter for node in nodes] == ["suffix", "", "suffix", "", ""]
    assert nodes[1].target_prob == pytest.approx(0.25)
    assert nodes[4].target_prob is None
    assert [node.why for node in nodes[1:]] == [
        "the target's token is 'three' (p 0.12), proposal 2 of 2 here, with score 0.20",
        "it is the target's token",
        "its parent was rejected",
        "its expected gain was below the cost of a row",
    ]


def test_a_token_that_nobody_guessed_is_said_to_be_so() -> None:
    tree = pb.StepTree(token_ids=[1], parents=[-1], scores=b"\xcc", verified=[0], logprobs=[-2.0])
    (node,) = explain(choice_of((2, 0.9), tree=tree), TEXTS).steps[1].nodes
    assert node.why == "the target's token is 'two' (p 0.90), which was not proposed here"


def test_who_proposed_a_node_is_told_where_the_target_tells_it() -> None:
    tree = pb.StepTree()
    tree.CopyFrom(TREE)
    tree.drafters.extend(["draft_model", "ngram"])
    tree.proposed_by = bytes([0, 1, 0, 1, 0])
    told = explain(choice_of((1, 0.5), (3, 0.125), (4, 0.75), tree=tree), TEXTS)
    assert [node.drafter for node in told.steps[1].nodes] == [
        "draft_model",
        "ngram",
        "draft_model",
        "ngram",
        "draft_model",
    ]
    assert told.by_drafter == {
        "draft_model": {"proposed": 3, "verified": 2, "accepted": 2},
        "ngram": {"proposed": 2, "verified": 2, "accepted": 0},
    }


def test_what_comes_after_the_end_of_the_choice_was_not_refused() -> None:
    tree = pb.StepTree(
        token_ids=[1, 2], parents=[-1, 0], scores=b"\xcc\xcc", verified=[0, 1], logprobs=[-1.0, -1.0], accepted=[0]
    )
    assert explain(choice_of((1, 0.5), tree=tree), TEXTS).steps[1].nodes[1].why == "the choice ended before it"


def test_times_of_a_step_make_up_the_time_since_the_one_before() -> None:
    first, second = (step.times for step in explained().steps)
    assert (first.at_ms, first.step_ms, first.elsewhere_ms) == (10.0, 7.0, 3.0)
    assert second.step_ms + second.hold_off_ms + second.elsewhere_ms == pytest.approx(4.0)
    assert explained().lost == pytest.approx({"steps of the target": 2.0, "waiting for a draft": 0.5, "elsewhere": 1.5})


def test_texts_are_wanted_of_all_that_was_proposed_or_committed() -> None:
    assert token_ids_of(choice_of((1, 0.5))) == {1, 2, 3, 4, 5}


class Seen(HTMLParser):
    """Tags, attributes, and what stands between `style` tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.style = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["style"] and not self.style:
            self.style = data


HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\u202e"


def test_a_page_runs_and_loads_nothing_whatever_the_model_says() -> None:
    choice = choice_of((1, 0.5), (3, 0.125), (4, 0.75))
    for token in choice.tokens:
        token.text, token.drafter = HOSTILE, HOSTILE
    page = page_of(explain(choice, dict.fromkeys(TEXTS, HOSTILE)), title=HOSTILE, facts={HOSTILE: HOSTILE})
    seen = Seen()
    seen.feed(page)
    assert not {"script", "img", "link", "iframe", "object", "a"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert seen.tags.count("svg") == 1
    [policy] = [value or "" for name, value in seen.attributes if name == "content" and "default-src" in (value or "")]
    digest = base64.b64encode(hashlib.sha256(seen.style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert f"style-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
