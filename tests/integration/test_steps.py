"""Steps told over gRPC: every token is of one, whatever the target knows of trees, and nobody is told unasked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.scripted.replica import ScriptedSession
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import expected_ids, request, running

TREE = pb.StepTree(
    token_ids=[5, 6], parents=[-1, 0], scores=b"\x80\x40", verified=[0, 1], logprobs=[-0.5, -1.0], accepted=[0]
)


class TellingTarget(ScriptedTarget):
    """Tells what `tree_of` makes of a verdict, to whoever asks."""

    def __init__(self) -> None:
        super().__init__()
        self.tree_of: Callable[[pb.Verdict], pb.StepTree | None] = lambda verdict: TREE

    def emit(self, session: ScriptedSession, **body: Any) -> None:
        verdict = body.get("verdict")
        if verdict is not None and session.body.tells_trees and (tree := self.tree_of(verdict)) is not None:
            told = pb.Verdict()
            told.CopyFrom(verdict)
            told.tree.CopyFrom(tree)
            body["verdict"] = told
        super().emit(session, **body)


async def told(call: Any) -> tuple[list[int], list[api.DecodingStep]]:
    """The tokens and steps of the first choice."""
    ids: list[int] = []
    steps: list[api.DecodingStep] = []
    async for chunk in call:
        if chunk.HasField("delta") and chunk.delta.index == 0:
            ids += [token.id for token in chunk.delta.tokens]
            steps += chunk.delta.steps
    return ids, steps


def covered(steps: list[api.DecodingStep]) -> list[int]:
    return [index for step in steps for index in range(step.start, step.start + step.num_tokens)]


async def test_who_asks_is_told_of_each_step_with_its_tree() -> None:
    target = TellingTarget()
    target.tokens_per_verdict = 3
    async with running([target]) as harness:
        ids, steps = await told(harness.stub.Generate(request(max_tokens=20, with_steps=True)))
    assert ids == expected_ids(target, 20)
    assert covered(steps) == list(range(20))
    assert [step.num_tokens for step in steps] == [1, 3, 3, 3, 3, 3, 3, 1]
    assert all(step.tree == TREE and step.step_us == 100 for step in steps)
    assert [step.at_us for step in steps] == sorted(step.at_us for step in steps)


async def test_who_does_not_ask_is_told_nothing_and_neither_is_the_target_asked() -> None:
    target = TellingTarget()
    async with running([target]) as harness:
        _, steps = await told(harness.stub.Generate(request(max_tokens=5)))
    assert steps == []


async def test_an_older_target_has_steps_without_trees() -> None:
    target = ScriptedTarget()
    target.tokens_per_verdict = 3
    async with running([target]) as harness:
        _, steps = await told(harness.stub.Generate(request(max_tokens=20, with_steps=True)))
    assert covered(steps) == list(range(20))
    assert not any(step.HasField("tree") for step in steps)


async def test_steps_of_a_verdict_in_pieces_are_told_whole_and_once() -> None:
    target = TellingTarget()
    target.tokens_per_verdict = 4

    def partial(verdict: pb.Verdict) -> pb.StepTree | None:
        verdict.is_partial = verdict.start_position % 8 < 4 and not verdict.finish_reason
        return None if verdict.is_partial else TREE

    target.tree_of = partial
    async with running([target]) as harness:
        ids, steps = await told(harness.stub.Generate(request(max_tokens=21, with_steps=True)))
    assert ids == expected_ids(target, 21)
    assert covered(steps) == list(range(21))
    assert max(step.num_tokens for step in steps) > 4


async def test_a_tree_that_is_none_costs_the_target_its_session_and_the_client_nothing() -> None:
    target = TellingTarget()

    def broken(verdict: pb.Verdict) -> pb.StepTree:
        target.tree_of = lambda verdict: TREE
        return pb.StepTree(token_ids=[2**32 - 1] * 70, accepted=[9])

    target.tree_of = broken
    async with running([target]) as harness:
        ids, steps = await told(harness.stub.Generate(request(max_tokens=20, with_steps=True)))
        assert harness.metric("token_mismatches_total") == 1
    assert ids == expected_ids(target, 20)
    assert covered(steps) == list(range(20))


async def test_a_stop_string_cuts_the_last_step_with_its_tokens() -> None:
    target = TellingTarget()
    target.tokens_per_verdict = 6
    async with running([target]) as harness:
        whole = [chunk async for chunk in harness.stub.Generate(request(max_tokens=20))]
        text = "".join(chunk.delta.text for chunk in whole if chunk.HasField("delta"))
        body = request(max_tokens=20, with_steps=True, stop=[text[5:7]])
        ids, steps = await told(harness.stub.Generate(body))
    assert 0 < len(ids) < 20
    assert covered(steps) == list(range(len(ids)))
