"""/v1/responses: its requests are chats, and its events add up to its answer."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.problems import validated
from specdec.gateway.api.responses import ResponsesRequest
from specdec.gateway.chat.deltas import PlainParser
from specdec.gateway.translation.head import AnswerHead
from specdec.gateway.translation.response_answer import ResponseEvents
from specdec.gateway.translation.response_request import response_to_chat, response_to_generate
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.for_each import for_each
from tests.support.services.chunks import choice_finished, delta, finished, started, texts_of

TEXTS = texts_of(["zero", "one", "two"])


def generate(**fields: Any) -> api.GenerateRequest:
    request = validated(ResponsesRequest, {"input": "hi", **fields})
    return response_to_generate(request, response_to_chat(request))


def events(*chunks: api.GenerateResponse, **fields: Any) -> list[dict[str, Any]]:
    answer = ResponseEvents(
        validated(ResponsesRequest, {"input": "hi", **fields}), AnswerHead("resp_1", 5), PlainParser()
    )
    return [event for chunk in chunks for event in answer.add(chunk, TEXTS)]


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        generate(**fields)
    return caught.value


def test_a_text_and_instructions_are_a_conversation() -> None:
    body = generate(instructions="be kind", max_output_tokens=9, temperature=0, top_logprobs=2, seed=4)
    told = [(message.role, message.content) for message in body.messages.messages]
    assert told == [("system", "be kind"), ("user", "hi")]
    assert (body.sampling.max_tokens, body.sampling.logprobs, body.sampling.seed) == (9, 2, 4)
    assert body.sampling.temperature == 0.0
    assert body.sampling.HasField("temperature")


def test_messages_of_an_earlier_answer_are_taken() -> None:
    said = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "developer", "content": "c"},
    ]
    assert [message.role for message in generate(input=said).messages.messages] == ["user", "assistant", "system"]


@for_each(
    "fields, param",
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"instructions": "x", "input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"colour": 1}, "colour"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.status, error.param) == (400, param)


def test_events_come_in_openais_order_and_add_up() -> None:
    chunks = (started(), delta("Hel", [1]), delta("lo", [2]), choice_finished(), finished())
    told = events(*chunks)
    assert [event["type"].removeprefix("response.") for event in told] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in told] == list(range(10))
    whole = told[-1]["response"]
    assert "".join(event.get("delta", "") for event in told) == whole["output"][0]["content"][0]["text"] == "Hello"
    assert whole["usage"]["total_tokens"] == 7
    assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 2}
    assert (whole["status"], whole["store"], whole["model"]) == ("completed", False, "the-model")


def test_an_answer_that_is_cut_says_so() -> None:
    told = events(started(), delta("x", [1]), choice_finished(pb.FINISH_REASON_LENGTH), finished())
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_log_probabilities_come_with_their_text() -> None:
    chunks = (started(), delta("one", [1], logprobs=True), choice_finished(), finished())
    told = events(*chunks, top_logprobs=1)
    (entry,) = told[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["logprob"]) == ("one", -1.0)


def test_origins_and_steps_come_with_their_tokens_and_with_the_whole_answer() -> None:
    first, second = delta("one", [1]), delta("", [2, 0])
    step = api.DecodingStep(start=0, num_tokens=1, tree=pb.StepTree(token_ids=[1], parents=[-1], scores=b"\xff"))
    first.delta.steps.append(step)
    second.delta.steps.append(api.DecodingStep(start=1, num_tokens=2))
    chunks = (started(), first, second, choice_finished(), finished())
    told = events(*chunks, return_token_origins=True, return_steps=True)
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert [[token["id"] for token in event["token_origins"]] for event in deltas] == [[1], [2, 0]]
    assert [step["start"] for event in deltas for step in event["steps"]] == [0, 1]
    whole = told[-1]["response"]
    assert whole["token_origins"] == [token for event in deltas for token in event["token_origins"]]
    assert whole["steps"] == [step for event in deltas for step in event["steps"]]
    assert whole["steps"][0]["nodes"][0]["text"] == "one"
    assert not {"token_origins", "steps"} & told[0]["response"].keys()
    silent = events(*chunks)
    assert all(not {"token_origins", "steps"} & {**event, **event.get("response", {})}.keys() for event in silent)


def test_speculation_and_what_is_told_of_it_are_asked_for_as_in_chats() -> None:
    body = generate(return_steps=True, speculation={"enabled": False}, cache_salt="x")
    assert body.cache_salt == "x"
    assert body.with_steps and body.speculation.enabled is False
    assert not generate().with_steps
    assert refusal(prediction={"type": "content", "content": "x"}).param == "prediction"
