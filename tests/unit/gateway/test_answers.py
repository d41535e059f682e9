"""From gRPC's chunks to OpenAI's objects: events and whole answers say the same, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.client import Completion
from specdec.gateway.api.answers import ChatCompletion, ChatCompletionChunk, TextCompletion
from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.problems import validated
from specdec.gateway.chat.deltas import MessageDelta, PlainParser, ToolCallDelta
from specdec.gateway.translation.chat_answer import ChatEvents, ChatWhole, ParsedOutput
from specdec.gateway.translation.completion_answer import (
    CompletionEvents,
    CompletionWhole,
    PromptTold,
    completion_usage,
)
from specdec.gateway.translation.head import AnswerHead
from specdec.gateway.translation.logprobs import CompletionLogprobsWriter
from specdec.gateway.translation.origins import OriginCounter
from specdec.gateway.translation.usage import acceptance_histogram
from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.for_each import for_each
from tests.support.services.chunks import choice_finished, delta, finished, prompt_logprobs, started, texts_of

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven"]
TEXTS = texts_of(WORDS)


def head() -> AnswerHead:
    return AnswerHead("id-1", 1000)


def chat_request(**fields: Any) -> ChatRequest:
    return validated(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], **fields})


def chat_events(chunks: list[api.GenerateResponse], *, echo: str = "", **fields: Any) -> list[dict[str, Any]]:
    answer = ChatEvents(chat_request(stream=True, **fields), head(), PlainParser, echo)
    events = [event for chunk in chunks for event in answer.add(chunk, TEXTS)]
    for event in events:
        ChatCompletionChunk.model_validate(event)
    return events


def chat_whole(chunks: list[api.GenerateResponse], *, make_parser: Any = PlainParser, **fields: Any) -> dict[str, Any]:
    completion = Completion()
    for chunk in chunks:
        completion.add(chunk)
    assert completion.started is not None
    top = head()
    top.take(completion.started)
    whole = ChatWhole(chat_request(**fields), top, make_parser, "")
    answer = whole.answer(outputs_of(completion), completion.prompt_logprobs, TEXTS, completion.require_finished())
    ChatCompletion.model_validate(answer)
    return answer


def outputs_of(completion: Completion) -> dict[int, ParsedOutput]:
    return {
        index: ParsedOutput(choice.text, choice.tokens, choice.finished or api.ChoiceFinished())
        for index, choice in completion.choices.items()
    }


def completion_events(chunks: list[api.GenerateResponse], told: PromptTold, **fields: Any) -> list[dict[str, Any]]:
    request = validated(CompletionRequest, {"prompt": "x", "stream": True, **fields})
    answer = CompletionEvents(request, head(), 0, told)
    events = [event for chunk in chunks for event in answer.add(chunk, TEXTS)]
    for event in events:
        TextCompletion.model_validate(event)
    return events


def completion_whole(chunks: list[api.GenerateResponse], told: PromptTold, **fields: Any) -> list[dict[str, Any]]:
    completion = Completion()
    for chunk in chunks:
        completion.add(chunk)
    request = validated(CompletionRequest, {"prompt": "x", **fields})
    whole = CompletionWhole(request, head(), 0, told)
    choices = whole.choices(outputs_of(completion), completion.prompt_logprobs, TEXTS)
    usage = completion_usage(request, [completion.require_finished()])
    TextCompletion.model_validate({**head().fields("text_completion"), "choices": choices, **usage})
    return choices


PLAIN = [started(), delta("Hel", [1]), delta("lo", [2, 3]), choice_finished(), finished()]


def test_a_stream_begins_with_the_role_and_ends_with_an_empty_delta_and_the_reason() -> None:
    deltas = [event["choices"][0]["delta"] for event in chat_events(PLAIN)]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    reasons = [event["choices"][0]["finish_reason"] for event in chat_events(PLAIN)]
    assert reasons == [None, None, None, "stop"]


def test_every_chunk_has_the_same_head() -> None:
    heads = [{**event, "choices": None} for event in chat_events(PLAIN)]
    assert heads[0]["model"] == "the-model" and heads[0]["system_fingerprint"] == "float32/here"
    assert all(one == heads[0] for one in heads)


def test_usage_comes_in_a_chunk_of_its_own_and_is_null_before() -> None:
    *others, last = chat_events(PLAIN, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in others)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}
    }  # fmt: skip
    assert "usage" not in chat_events(PLAIN)[0]


def test_continuous_usage_counts_tokens_as_they_come() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in chat_events(PLAIN, stream_options=options)]
    assert counts == [1, 1, 3, 3, 4]


def test_an_echo_comes_before_the_output() -> None:
    contents = [event["choices"][0]["delta"].get("content") for event in chat_events(PLAIN, echo="so: ")]
    assert contents == ["", "so: ", "Hel", "lo", None]


def test_a_choice_without_output_still_has_a_role_and_an_end() -> None:
    events = chat_events([started(), choice_finished(), finished()])
    assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant", "content": ""}, {}]


def test_tokens_without_text_are_told_when_they_are_asked_for() -> None:
    chunks = [started(), delta("", [1]), delta("ab", [2]), choice_finished(), finished()]
    told = [event["choices"][0].get("token_ids", []) for event in chat_events(chunks, return_token_ids=True)]
    assert [token for ids in told for token in ids] == [1, 2]
    assert len(chat_events(chunks)) == 3


def test_log_probabilities_of_chats_name_tokens_bytes_and_alternatives() -> None:
    chunks = [started(), delta("one", [1], logprobs=True), choice_finished(), finished()]
    (entry,) = chat_whole(chunks, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("one", -1.0, list(b"one"))
    assert entry["top_logprobs"] == [{"token": "zero", "logprob": -0.5, "bytes": list(b"zero")}]
    by_id = chat_whole(chunks, logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["content"][0]
    assert by_id["token"] == "token_id:1"


@pytest.mark.parametrize(
    ("ended", "reason", "stop"),
    [
        (choice_finished(), "stop", None),
        (choice_finished(stop_string="END"), "stop", "END"),
        (choice_finished(stop_token_id=7), "stop", 7),
        (choice_finished(stop_token_id=2), "stop", None),
        (choice_finished(pb.FINISH_REASON_LENGTH), "length", None),
        (choice_finished(pb.FINISH_REASON_ABORT), "abort", None),
    ],
)
def test_what_ended_a_choice_is_told(ended: api.GenerateResponse, reason: str, stop: str | int | None) -> None:
    chunks = [started(), delta("x", [1]), ended, finished()]
    choice = chat_whole(chunks, stop_token_ids=[7])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    assert chat_events(chunks, stop_token_ids=[7])[-1]["choices"][0]["stop_reason"] == stop


class Caller(PlainParser):
    """Makes a call of everything."""

    def push(self, text: str) -> list[MessageDelta]:
        first = MessageDelta(tool_call=ToolCallDelta(0, "call-1", "f", ""))
        return [first, MessageDelta(tool_call=ToolCallDelta(0, "", "", text))]


NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@for_each("choice, reason", [("auto", "tool_calls"), (NAMED, "stop"), (ALLOWED, "tool_calls")])
def test_calls_end_as_openai_ends_them(choice: Any, reason: str) -> None:
    chunks = [started(), delta("{}", [1]), choice_finished(), finished()]
    told = chat_whole(chunks, make_parser=Caller, tool_choice=choice)["choices"][0]
    assert told["finish_reason"] == reason
    assert told["message"]["content"] is None
    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert told["message"]["tool_calls"] == [call]


def test_a_number_of_choices_that_will_be_refused_costs_nothing() -> None:
    chunks = [started(), delta("a", index=1), choice_finished(pb.FINISH_REASON_STOP, index=1), finished()]
    assert [event["choices"][0]["index"] for event in chat_events(chunks, n=2**32 - 1)] == [1, 1, 1]


def test_speculation_is_told_in_numbers() -> None:
    told = chat_whole(PLAIN)["metrics"]["speculative_decoding"]
    assert told == {
        "num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 5, "num_spec_tokens": 3,
        "mean_acceptance_length": 2.25, "draft_acceptance_rate": 0.625, "acceptance_histogram": [1, 1, 2, 0],
    }  # fmt: skip


@given(st.lists(st.integers(0, 5), max_size=20))
def test_the_histogram_is_that_of_the_steps(accepted: list[int]) -> None:
    by_depth = [sum(one >= depth for one in accepted) for depth in range(1, 6)]
    assert acceptance_histogram(len(accepted), by_depth) == [accepted.count(number) for number in range(6)]


def test_origins_count_rounds_and_depths() -> None:
    kinds = [
        pb.ORIGIN_PREFILL,
        pb.ORIGIN_DRAFT,
        pb.ORIGIN_DRAFT,
        pb.ORIGIN_BONUS,
        pb.ORIGIN_DECODE,
        pb.ORIGIN_RECOVERED,
    ]
    tokens = list(delta("", range(6), origins=kinds).delta.tokens)
    counter = OriginCounter()
    told = [*counter.told(tokens[:2]), *counter.told(tokens[2:])]
    assert [(one["origin"], one["round"], one["depth"]) for one in told] == [
        ("prefill", 0, None), ("draft", 1, 1), ("draft", 1, 2), ("bonus", 1, None), ("decode", 2, None),
        ("recovered", 3, None),
    ]  # fmt: skip


def test_a_scored_prompt_has_its_log_probabilities_and_nothing_else() -> None:
    chunks = [started(), prompt_logprobs([1, 2, 3]), delta("four", [4], logprobs=True), choice_finished(), finished()]
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = completion_whole(chunks, PromptTold("onetwothree"), **fields)
    assert choice["text"] == "onetwothree"
    assert choice["logprobs"] == {
        "tokens": ["one", "two", "three"], "token_logprobs": [None, -2.0, -3.0],
        "top_logprobs": [None, {"zero": -0.5, "two": -2.0}, {"zero": -0.5, "three": -3.0}],
        "text_offset": [0, 3, 6],
    }  # fmt: skip


def test_the_output_follows_the_prompt_in_offsets() -> None:
    chunks = [started(), prompt_logprobs([0, 1, 2]), delta("four", [4], logprobs=True), choice_finished(), finished()]
    (choice,) = completion_whole(chunks, PromptTold("onetwo"), echo=True, logprobs=0)
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 6]  # token 0 is not in the text: such as what begins it
    assert choice["logprobs"]["tokens"][-1] == "four"


def test_tokens_of_one_character_share_its_offset_and_hidden_tokens_take_none() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    texts = TokenTexts({0: b"<s>", 1: b"ab", 2: first, 3: second, 4: b"c", 5: b" Hello"}, {0})
    tokens = list(delta("", [1, 2, 3, 0, 4, 2, 4, 4], logprobs=True).delta.tokens)
    hidden = CompletionLogprobsWriter(texts)
    assert hidden.of_output(tokens)["text_offset"] == [0, 2, 2, 3, 3, 4, 5, 6]  # "abéc\ufffdcc"
    shown = CompletionLogprobsWriter(texts, hides_special=False)
    assert shown.of_output(tokens)["text_offset"] == [0, 2, 2, 3, 6, 7, 8, 9]
    echoed = CompletionLogprobsWriter(texts)
    prompt = api.PromptLogprobs(token_ids=[0, 5, 2, 3, 4])
    assert echoed.of_prompt(prompt, "Helloéc")["text_offset"] == [0, 0, 5, 5, 6]
    assert echoed.of_output(tokens[:1])["text_offset"] == [7]
    written = CompletionLogprobsWriter(texts)
    assert written.of_prompt(api.PromptLogprobs(token_ids=[1, 0, 4]), "ab<s>c")["text_offset"] == [0, 2, 5]


def test_output_waits_for_all_of_the_prompts_log_probabilities() -> None:
    chunks = [
        started(3), delta("b", [5], index=1, logprobs=True), prompt_logprobs([1, 2]), prompt_logprobs([3], start=2),
        delta("a", [4], logprobs=True), choice_finished(), choice_finished(index=1), finished(),
    ]  # fmt: skip
    events = completion_events(chunks, PromptTold("onetwothree"), echo=True, logprobs=0, n=2)
    first = next(event["choices"][0] for event in events if event["choices"][0]["index"] == 1)
    assert first["logprobs"]["tokens"] == ["one", "two", "three"]


CUTS = st.lists(st.tuples(st.text("ab é", max_size=4), st.lists(st.integers(0, 7), max_size=3)), max_size=8)


@settings(max_examples=100, deadline=None)
@given(CUTS, st.booleans(), st.booleans())
def test_events_add_up_to_the_whole_answer(pieces: list[tuple[str, list[int]]], has_logprobs: bool, echo: bool) -> None:
    outputs = [delta(text, ids, logprobs=has_logprobs) for text, ids in pieces]
    chunks = [started(3), *([prompt_logprobs([1, 2, 3])] if has_logprobs and echo else [])]
    chunks += [*outputs, choice_finished(), finished()]
    fields: dict[str, Any] = {"echo": echo, "return_token_ids": True, **({"logprobs": 1} if has_logprobs else {})}
    told = PromptTold("onetwothree" if echo else "", [1, 2, 3])
    if not any(text or ids for text, ids in pieces):
        chunks.insert(-2, delta("", []))
    (whole,) = completion_whole(chunks, told, **fields)
    choices = [event["choices"][0] for event in completion_events(chunks, told, **fields)]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == whole["token_ids"]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    joined = {name: [entry for part in parts for entry in part[name]] for name in whole["logprobs"] or {}}
    assert joined == (whole["logprobs"] or {})
    assert [choice["finish_reason"] for choice in choices][-1] == whole["finish_reason"]
    chat_fields = {"logprobs": has_logprobs, "return_token_ids": True}
    answer = chat_whole(chunks, **chat_fields)["choices"][0]
    events = [event["choices"][0] for event in chat_events(chunks, **chat_fields)]
    assert "".join(event["delta"].get("content", "") for event in events) == answer["message"]["content"]
    assert [token for event in events for token in event.get("token_ids", [])] == answer["token_ids"]
    entries = [entry for event in events if event["logprobs"] for entry in event["logprobs"]["content"]]
    assert entries == ((answer["logprobs"] or {}).get("content") or [])


def test_a_token_that_is_half_a_character_has_its_bytes() -> None:
    texts = TokenTexts({9: "é".encode()[:1]})
    assert (texts.text(9), texts.utf8(9), texts.name(9)) == ("\ufffd", b"\xc3", "\ufffd")
