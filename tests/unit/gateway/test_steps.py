"""Steps of the target as clients are told of them, in streams and in whole answers."""

from __future__ import annotations

import math
from typing import Any

from specdec.gateway.api.answers import DecodingStep
from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.problems import validated
from specdec.gateway.chat.deltas import PlainParser
from specdec.gateway.translation.chat_answer import ChatEvents
from specdec.gateway.translation.chat_request import chat_to_generate
from specdec.gateway.translation.completion_answer import CompletionEvents, PromptTold
from specdec.gateway.translation.completion_request import completion_to_generate
from specdec.gateway.translation.head import AnswerHead
from specdec.gateway.translation.logprobs import LEAST, ids_in
from specdec.gateway.translation.steps import steps_told
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.chunks import choice_finished, delta, finished, started, texts_of

TEXTS = texts_of(["zero", "one", "two", "three"])
TREE = pb.StepTree(
    token_ids=[1, 2, 3],
    parents=[-1, 0, 0],
    scores=bytes([255, 51, 0]),
    verified=[0, 1],
    logprobs=[-0.5, -math.inf],
    accepted=[0],
    drafters=["ngram", "draft_model"],
    proposed_by=bytes([1, 0, 1]),
)
STEP = api.DecodingStep(start=0, num_tokens=2, tree=TREE, at_us=1500, step_us=700, hold_off_us=200, draft_us=100)


def chunks() -> list[api.GenerateResponse]:
    output = delta("one zero", [1, 0])
    output.delta.steps.append(STEP)
    return [started(), output, delta("!", [3]), choice_finished(), finished()]


def test_a_step_tells_what_it_had_to_choose_from_and_what_it_took() -> None:
    (told,) = steps_told([STEP], TEXTS)
    DecodingStep.model_validate(told)
    assert [node["text"] for node in told["nodes"]] == ["one", "two", "three"]
    assert [node["parent"] for node in told["nodes"]] == [None, 0, 0]
    assert [node["state"] for node in told["nodes"]] == ["accepted", "rejected", "unverified"]
    assert [node["score"] for node in told["nodes"]] == [1.0, 0.2, 0.0]
    assert [node["logprob"] for node in told["nodes"]] == [-0.5, LEAST, None]
    assert [node["drafter"] for node in told["nodes"]] == ["draft_model", "ngram", "draft_model"]
    times = [told[name] for name in ("at_ms", "step_ms", "hold_off_ms", "draft_ms")]
    assert times == [1.5, 0.7, 0.2, 0.1]


def test_nodes_of_a_target_that_does_not_name_drafters_have_none() -> None:
    silent = api.DecodingStep()
    silent.CopyFrom(STEP)
    silent.tree.ClearField("drafters")
    silent.tree.ClearField("proposed_by")
    (told,) = steps_told([silent], TEXTS)
    assert [node["drafter"] for node in told["nodes"]] == [None, None, None]


def test_texts_are_asked_for_of_all_tokens_of_a_tree() -> None:
    assert {1, 2, 3} <= set(ids_in(chunks()[1]))


def chat_choices(**fields: Any) -> list[dict[str, Any]]:
    request = validated(ChatRequest, {"messages": [{"role": "user", "content": "x"}], "stream": True, **fields})
    events = ChatEvents(request, AnswerHead("id", 1), PlainParser, "")
    return [event["choices"][0] for chunk in chunks() for event in events.add(chunk, TEXTS)]


def completion_choices(**fields: Any) -> list[dict[str, Any]]:
    request = validated(CompletionRequest, {"prompt": "x", "stream": True, **fields})
    events = CompletionEvents(request, AnswerHead("id", 1), 0, PromptTold())
    return [event["choices"][0] for chunk in chunks() for event in events.add(chunk, TEXTS)]


def test_steps_come_with_their_tokens_to_who_asks() -> None:
    for choices in (chat_choices(return_steps=True), completion_choices(return_steps=True)):
        assert [step for choice in choices for step in choice["steps"]] == steps_told([STEP], TEXTS)
    for choices in (chat_choices(), completion_choices()):
        assert all("steps" not in choice for choice in choices)


def test_coordinators_are_asked_only_for_who_asks() -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    assert chat_to_generate(validated(ChatRequest, {**chat, "return_steps": True})).with_steps
    assert not chat_to_generate(validated(ChatRequest, chat)).with_steps
    text = validated(CompletionRequest, {"prompt": "x", "return_steps": True})
    assert completion_to_generate(text, 1)[0].with_steps
