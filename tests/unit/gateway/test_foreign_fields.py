"""Fields of other servers' clients: what asks for nothing is taken, what has another name here is renamed."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.fields import RequestModel
from specdec.gateway.api.problems import validated
from specdec.gateway.api.tokens import TokenizeBody
from specdec.gateway.responses.request import ResponsesRequest
from specdec.gateway.translation.chat_request import chat_to_generate
from specdec.gateway.translation.completion_request import completion_to_generate
from specdec.v1 import coordinator_pb2 as api
from tests.support.for_each import for_each

MESSAGES = [{"role": "user", "content": "x"}]
LEAST: dict[type[RequestModel], dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
}


def chat(**fields: Any) -> api.GenerateRequest:
    return chat_to_generate(validated(ChatRequest, {"messages": MESSAGES, **fields}))


NOTHING: list[dict[str, Any]] = [
    {"best_of": 1}, {"length_penalty": 1.0}, {"length_penalty": 1}, {"early_stopping": False}, {"repeat_penalty": 1.0},
    {"typical_p": 1}, {"mirostat": 0}, {"dry_multiplier": 0.0}, {"cache_prompt": True}, {"keep_alive": "5m"},
    {"keep_alive": -1}, {"chat_id": "x"}, {"session_id": "x"}, {"id_slot": -1}, {"max_tokens": -1},
    {"max_tokens": -1.0}, {"max_completion_tokens": -1}, {"stop": ""}, {"stop": []}, {"stop": [""]},
    {"anything": None}, {"add_special_tokens": False}, {"usage": {"include": True}}, {"provider": {"order": ["x"]}},
]  # fmt: skip


@for_each("fields", NOTHING)
def test_what_asks_for_nothing_changes_nothing_and_is_taken_where_unknown_fields_are_refused(
    fields: dict[str, Any],
) -> None:
    assert chat(**fields) == chat()


@for_each("model", LEAST)
def test_whole_numbers_may_be_written_as_floats(model: type[RequestModel]) -> None:
    name = "max_output_tokens" if model is ResponsesRequest else "max_tokens"
    asked: Any = validated(model, {**LEAST[model], name: 8.0, "top_k": 40.0, "seed": 7.0})
    assert (getattr(asked, name), asked.top_k, asked.seed) == (8, 40, 7)
    assert type(asked.top_k) is int
    for value in (8.5, float("inf"), float("nan"), "8", True):
        with pytest.raises(ApiError) as caught:
            validated(model, {**LEAST[model], name: value})
        assert caught.value.param == name


@for_each("model", LEAST)
def test_top_p_zero_is_the_most_likely_token_alone(model: type[RequestModel]) -> None:
    for zero in (0, 0.0):
        asked: Any = validated(model, {**LEAST[model], "top_p": zero})
        assert 0 < asked.top_p < 1e-5
    for value in (-0.1, 1.1, False):
        with pytest.raises(ApiError):
            validated(model, {**LEAST[model], "top_p": value})


def test_a_completion_without_an_end_takes_what_fits_and_its_own_fields_keep_their_meaning() -> None:
    def completion(**fields: Any) -> Any:
        return completion_to_generate(validated(CompletionRequest, {"prompt": "x", **fields}), 8)[0].sampling

    assert not completion(max_tokens=-1).HasField("max_tokens")
    assert completion().max_tokens == 16
    assert completion(length_penalty=1.0) == completion()
    for fields in ({"best_of": 1, "n": 2}, {"length_penalty": 2.0}, {"add_special_tokens": False}):
        with pytest.raises(ApiError):
            completion(**fields)
    assert validated(TokenizeBody, {"prompt": "x", "add_special_tokens": False}).add_special_tokens is False


@for_each(
    "sent, same",
    [
        ({"guided_json": {"type": "integer"}}, {"structured_outputs": {"json": {"type": "integer"}}}),
        ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"guided_grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "integer"}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}},
        ),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"reasoning": {"enabled": False}},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        ({"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"a": 1}},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False, "a": 1}},
        ),
        (
            {"think": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": True}},
        ),
    ],
)
def test_names_of_other_servers_mean_what_they_mean_there(sent: dict[str, Any], same: dict[str, Any]) -> None:
    assert chat(**sent) == chat(**same)


def test_the_form_that_contradicts_another_is_refused() -> None:
    with pytest.raises(ApiError, match="exactly one"):
        chat(guided_json={}, guided_regex="a")


def test_unknown_fields_are_left_out_and_told_by_their_path() -> None:
    ignored: list[str] = []
    asked = validated(
        ChatRequest,
        {
            "messages": MESSAGES,
            "temprature": 1,
            "reasoning": "much",
            "thinking": 5,
            "add_special_tokens": True,
            "stream_options": {"include_usage": True, "shape": "round", "colour": 1},
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "deep": {"er": 1}}},
            "stream": True,
        },
        ignored,
    )
    assert asked.has_usage_chunk
    assert sorted(ignored) == [
        "add_special_tokens", "reasoning", "response_format.json_schema.deep", "stream_options.colour",
        "stream_options.shape", "temprature", "thinking",
    ]  # fmt: skip


def test_an_unknown_field_beside_the_form_that_the_type_names_leaves_the_form() -> None:
    ignored: list[str] = []
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}, "shape": 1}
    asked = validated(ChatRequest, {"messages": MESSAGES, "response_format": form}, ignored)
    assert ignored == ["response_format.shape"]
    assert asked.response_format is not None
    assert asked.response_format.type == "json_schema"


def test_what_cannot_be_honoured_is_refused_where_unknown_fields_are_ignored() -> None:
    for name, value in {
        "audio": {"voice": "x"},
        "functions": [{"name": "f"}],
        "temperature": "x",
    }.items():
        with pytest.raises(ApiError) as caught:
            validated(ChatRequest, {"messages": MESSAGES, name: value}, [])
        assert caught.value.param is not None and caught.value.param.startswith(name)


def test_ignoring_fields_costs_a_bounded_number_of_validations() -> None:
    many = {f"f{number}": 1 for number in range(1000)}
    ignored: list[str] = []
    validated(ChatRequest, {"messages": MESSAGES, **many}, ignored)
    assert len(ignored) == 1000
    with pytest.raises(ApiError, match="Unrecognized"):
        validated(ChatRequest, {"messages": MESSAGES, "stream": True, "stream_options": many}, [])
