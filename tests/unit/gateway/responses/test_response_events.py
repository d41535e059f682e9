"""The events of /v1/responses: their order, their numbers, and that they add up to the answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._models import construct_type_unchecked
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.problems import validated
from specdec.gateway.chat.deltas import PlainParser, StreamingParser
from specdec.gateway.chat.parsing import make_message_parser
from specdec.gateway.responses.answer import ResponseEvents
from specdec.gateway.responses.request import ResponsesRequest
from specdec.gateway.responses.to_chat import to_chat
from specdec.gateway.translation.head import AnswerHead
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.for_each import for_each
from tests.support.services.chunks import choice_finished, delta, finished, started, texts_of

TEXTS = texts_of(["zero", "one", "two"])
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
MEMBER = {"type": "namespace", "name": "maths", "tools": [TOOL]}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "x y"}}\n</tool_call>'
THOUGHT = "<think>Let me see.</think>\n\n"


def answer_to(parser: StreamingParser | None = None, **fields: Any) -> ResponseEvents:
    request = validated(ResponsesRequest, {"input": "hi", **fields})
    return ResponseEvents(request, to_chat(request, [])[1], AnswerHead("resp_1", 5), parser or PlainParser())


def events(*chunks: api.GenerateResponse, **fields: Any) -> list[dict[str, Any]]:
    answer = answer_to(**fields)
    return [event for chunk in chunks for event in answer.add(chunk, TEXTS)]


def said(pieces: list[str], reason: Any = pb.FINISH_REASON_STOP, **fields: Any) -> list[dict[str, Any]]:
    """The events of an output that thinks and calls."""
    fields = {"tools": [TOOL], "parser": make_message_parser("deepseek_r1", "hermes", has_tools=True), **fields}
    return events(started(), *map(delta, pieces), choice_finished(reason), finished(), **fields)


def kinds(told: list[dict[str, Any]]) -> list[str]:
    """Types of events; equal ones in a row are one."""
    return [kind for kind, _ in itertools.groupby(event["type"].removeprefix("response.") for event in told)]


def output(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = told[-1]["response"]["output"]
    return items


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
    assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}
    assert (whole["status"], whole["store"], whole["model"]) == ("completed", False, "the-model")


def test_thoughts_text_and_calls_are_items_in_openais_order() -> None:
    told = said([THOUGHT, "I add.", CALLED, CALLED.replace("12", "13")])
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(told) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", *call, *call, "completed"),
    ]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    thought, message, first, second = output(told)
    done = [event["name"] for event in told if event["type"] == "response.function_call_arguments.done"]
    assert done == [first["name"], second["name"]]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert (thought["summary"], "encrypted_content" in thought) == ([], False)
    assert message["content"][0]["text"] == "I add."
    assert [json.loads(call["arguments"]) for call in (first, second)] == [{"a": a, "b": "x y"} for a in (12, 13)]
    assert {item["status"] for item in output(told)} == {"completed"}
    assert [event["output_index"] for event in told if event["type"] == "response.output_item.done"] == [0, 1, 2, 3]
    assert len({item["id"] for item in output(told)}) == 4


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_however_an_output_is_cut_its_items_are_equal_and_openais_client_adds_them_up(data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from([THOUGHT + "I add." + CALLED, CALLED + " so", "x" + CALLED + CALLED, "plain", " "])
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    told, whole = said(pieces), said([text])
    for item, other in zip(output(told), output(whole), strict=True):
        assert item | {"call_id": ""} == other | {"call_id": ""}
    state: ResponseStreamState[None] = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for event in told:
        state.handle_event(construct_type_unchecked(type_=ResponseStreamEvent, value=event))  # type: ignore[arg-type]
    added_up: dict[int, str] = {}
    for event in told:
        if event["type"].endswith(".delta"):
            added_up[event["output_index"]] = added_up.get(event["output_index"], "") + event["delta"]
    texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in output(told)]
    assert [added_up.get(index, "") for index in range(len(texts))] == texts


def test_every_event_and_the_answer_are_what_openais_types_say() -> None:
    for event in said([THOUGHT, "I add.", CALLED]):
        parsed: Any = construct_type_unchecked(type_=ResponseStreamEvent, value=event)  # type: ignore[arg-type]
        type(parsed).model_validate(event)
    Response.model_validate(said([THOUGHT, CALLED])[-1]["response"])


def test_white_space_beside_calls_is_no_message_and_alone_it_is() -> None:
    assert [item["type"] for item in output(said(["\n", CALLED, "\n"]))] == ["function_call"]
    for pieces in (["\n"], []):
        [message] = output(said(pieces, parser=PlainParser()))
        assert message["content"][0]["text"] == "".join(pieces)


def test_a_function_of_a_namespace_is_called_by_its_own_name() -> None:
    [call] = output(said([CALLED.replace("add", "maths__add")], tools=[MEMBER]))
    assert (call["namespace"], call["name"]) == ("maths", "add")
    [other] = output(said([CALLED], tools=[TOOL, MEMBER]))
    assert (other["name"], "namespace" in other) == ("add", False)


def test_an_answer_that_is_cut_says_so() -> None:
    told = events(started(), delta("x", [1]), choice_finished(pb.FINISH_REASON_LENGTH), finished())
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    cut = said([THOUGHT, CALLED[:50]], pb.FINISH_REASON_LENGTH)
    assert [item["status"] for item in output(cut)] == ["completed", "incomplete"]


def test_an_answer_that_is_aborted_has_failed() -> None:
    told = events(started(), delta("x", [1]), choice_finished(pb.FINISH_REASON_ABORT), finished())
    assert (told[-1]["type"], told[-1]["response"]["error"]["code"]) == ("response.failed", "server_error")


@for_each("num_chunks", range(3))
def test_an_error_ends_the_stream_with_what_was_said_so_far(num_chunks: int) -> None:
    answer = answer_to()
    chunks = [started(), delta("x", [1])][:num_chunks]
    told = [event for chunk in chunks for event in answer.add(chunk, TEXTS)]
    told += answer.fail(ApiError(503, "no target", code="service_unavailable"))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    error, failed = told[-2:]
    assert (error["type"], error["code"], error["message"]) == ("error", "service_unavailable", "no target")
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "service_unavailable", "message": "no target"}
    texts = [item["content"][0]["text"] for item in failed["response"]["output"]]
    assert texts == ["x"][: max(0, num_chunks - 1)]
    assert all(item["status"] == "incomplete" for item in failed["response"]["output"])


def test_what_was_asked_is_told() -> None:
    choice = {"type": "function", "name": "add"}
    whole = said(["x"], tools=[TOOL, {"type": "web_search"}], tool_choice=choice, metadata={"a": "b"}, store=True)[-1]
    told = whole["response"]
    assert (told["tools"], told["tool_choice"], told["metadata"], told["store"]) == ([TOOL], choice, {"a": "b"}, False)


def test_log_probabilities_come_with_their_text() -> None:
    chunks = (started(), delta("one", [1], logprobs=True), choice_finished(), finished())
    for asked in ({"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}):
        (entry,) = output(events(*chunks, **asked))[0]["content"][0]["logprobs"]
        assert (entry["token"], entry["logprob"]) == ("one", -1.0)


def test_log_probabilities_of_thoughts_and_calls_are_left_out() -> None:
    parser = make_message_parser("deepseek_r1", "hermes", has_tools=True)
    texts = ("<think>Hm", ".", "</think>", "yes", CALLED[:20], CALLED[20:])
    deltas = [delta(text, [number], logprobs=True) for number, text in enumerate(texts)]
    told = events(started(), *deltas, choice_finished(), finished(), parser=parser, top_logprobs=0)
    [message] = [item for item in output(told) if item["type"] == "message"]
    assert [entry["logprob"] for entry in message["content"][0]["logprobs"]] == [-3.0]


def test_tokens_of_thoughts_are_counted() -> None:
    def tokens(*texts: str) -> api.GenerateResponse:
        made = [api.OutputToken(id=1, text=text) for text in texts]
        return api.GenerateResponse(delta=api.ChoiceDelta(text="".join(texts), tokens=made))

    for chunks, num in (
        ([tokens("<think>"), tokens("Hm", "."), tokens("</think>"), tokens("yes")], 3),
        ([tokens("<think>", "Hm", ".", "</think>", "yes", "!")], 4),
        ([tokens("yes", "!")], 0),
    ):
        parser = make_message_parser("deepseek_r1", "none", has_tools=False, thinking=chunks[0].delta.text != "yes!")
        told = events(started(), *chunks, choice_finished(), finished(), parser=parser)
        assert told[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == num, chunks


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
