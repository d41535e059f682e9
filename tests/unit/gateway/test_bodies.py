"""Bodies of requests: what is taken, and what is refused with the field's name."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.errors import ApiError, from_specdec
from specdec.gateway.api.fields import RequestModel
from specdec.gateway.api.problems import validated
from specdec.gateway.api.tokens import TokenizeBody
from specdec.gateway.http.json_reader import parsed
from specdec.gateway.translation.chat_request import CHAT_FIELD_NAMES, chat_to_generate
from specdec.gateway.translation.completion_request import completion_to_generate
from specdec.wire.errors import SpecdecError
from tests.support.for_each import for_each

MESSAGES = [{"role": "user", "content": "hi"}]
MODELS: tuple[type[RequestModel], ...] = (ChatRequest, CompletionRequest)
SMALL: dict[type[RequestModel], dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "x"},
}


def refusal(model: type[RequestModel], /, **fields: Any) -> ApiError:
    """The error of a body with these fields besides those it must have."""
    error = error_of(model, {**SMALL.get(model, {}), **fields})
    assert error is not None
    return error


@for_each(
    "name, allowed, refused",
    [
        ("temperature", [0, 0.7, 100], [-0.1, 100.5, "1", True, [1]]),
        ("top_p", [0, 0.01, 1], [-1, 1.01, "a"]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("top_k", [-1, 0, 40], [-2, 2**32, 1.5]),
        ("repetition_penalty", [0.01, 10], [0, 10.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("seed", [-(2**63), 0, 2**64 - 1], [-(2**63) - 1, 2**64, 0.5]),
        ("n", [1, 3], [0, -1, 1.5]),
        ("stop", ["a", ["a", "b"], []], [1, [1], {}]),
        ("stop_token_ids", [[], [0, 2**32 - 1]], [[-1], [2**32], ["a"], 5]),
        ("min_tokens", [0, 5], [-1, 2**32]),
        ("truncate_prompt_tokens", [1, 100], [0, -1]),
        ("logit_bias", [{"5": 1, "7": -100}], [{"5": 101}, {"x": 1}, {"-1": 1}, [1]]),
        ("prompt_logprobs", [0, 20], [-1, 257]),
        ("priority", [-(2**31), 2**31 - 1], [2**31]),
        ("request_id", ["abc-1"], ["", "a b", "x" * 129, 5]),
        ("ignore_eos", [True, False], ["yes", 1]),
        ("stream", [True, False], ["true", 1]),
        ("user", ["me"], [5]),
        ("model", ["target"], [5]),
        ("speculation", [{"enabled": False}, {"verify_mode": "coupled", "max_draft_tokens": 3}], [{"mode": 1}, 5]),
    ],
)
@for_each("model", MODELS)
def test_each_field_has_limits_and_is_named_when_they_are_crossed(
    model: type[RequestModel], name: str, allowed: list[Any], refused: list[Any]
) -> None:
    for value in [None, *allowed]:
        validated(model, {**SMALL[model], name: value})
    for value in refused:
        error = refusal(model, **{name: value})
        assert error.status == 400
        assert error.param is not None and error.param.startswith(name), (value, error.param)


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        (ChatRequest, "audio", {"voice": "x"}),
        (ChatRequest, "modalities", ["audio"]),
        (ChatRequest, "functions", [{"name": "f"}]),
        (ChatRequest, "web_search_options", {}),
        (CompletionRequest, "suffix", "x"),
        (CompletionRequest, "best_of", 3),
        (CompletionRequest, "logits_processors", ["x"]),
        (CompletionRequest, "use_beam_search", True),
        (CompletionRequest, "vllm_xargs", {"a": 1}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(model: type[RequestModel], name: str, value: Any) -> None:
    error = refusal(model, **{name: value})
    assert (error.status, error.code) == (400, "unsupported_parameter")
    assert error.param is not None and error.param.split(".")[0].split("[")[0] == name


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("documents", [[], [{"text": "x"}, {}]], [["x"], {"text": "x"}, "x", [[]]]),
        ("chat_template", ["{{ 1 }}"], ["", 5, ["x"]]),
    ],
)
@pytest.mark.parametrize("model", [ChatRequest, TokenizeBody])
def test_what_templates_are_told_has_its_types(
    model: type[RequestModel], name: str, allowed: list[Any], refused: list[Any]
) -> None:
    for value in [None, *allowed]:
        validated(model, {"messages": MESSAGES, name: value})
    for value in refused:
        error = error_of(model, {"messages": MESSAGES, name: value})
        assert error is not None
        assert error.status == 400
        assert error.param is not None and error.param.startswith(name)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "functions": [],
        "audio": None,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "bad_words": [],
        "vllm_xargs": {},
        "logit_bias": {},
        "chat_template_kwargs": {},
    }
    validated(ChatRequest, {**SMALL[ChatRequest], **fields})


@pytest.mark.parametrize("model", [*MODELS, TokenizeBody])
def test_unknown_fields_are_refused_as_openai_does(model: type[RequestModel]) -> None:
    error = refusal(model, temprature=1)
    assert error.message == "Unrecognized request argument supplied: temprature"
    assert (error.type, error.param) == ("invalid_request_error", "temprature")
    error = refusal(model, **{"x" * 5000: 1})
    assert len(error.message) < 300


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError, match=r"Missing required parameter: 'messages'"):
        validated(ChatRequest, {})
    with pytest.raises(ApiError, match=r"Missing required parameter: 'prompt'"):
        validated(CompletionRequest, {})


def test_an_object_of_an_unknown_type_is_told_the_known_ones() -> None:
    error = refusal(ChatRequest, response_format={"type": "json" * 50_000})
    assert (error.param, error.code) == ("response_format.type", "invalid_value")
    assert "'text', 'json_object', 'json_schema', 'structural_tag'" in error.message
    assert len(error.message) < 300
    error = refusal(ChatRequest, response_format={"json_schema": {}})
    assert (error.param, error.code) == ("response_format.type", "missing_required_parameter")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ],
)
def test_a_message_that_is_none_is_named(messages: Any, param: str) -> None:
    assert refusal(ChatRequest, messages=messages).param == param


@pytest.mark.parametrize(
    ("prompt", "param"), [([], "prompt"), ([[]], "prompt[0]"), ([1, "a"], "prompt"), ([-1], "prompt[0]"), (5, "prompt")]
)
def test_a_prompt_that_is_none_is_named(prompt: Any, param: str) -> None:
    error = refusal(CompletionRequest, prompt=prompt)
    assert error.param is not None and error.param.startswith("prompt")


def test_of_several_types_that_is_told_which_the_value_comes_nearest_to() -> None:
    error = refusal(CompletionRequest, prompt=[])
    assert error.code == "invalid_value" and "at least 1 item" in error.message
    error = refusal(CompletionRequest, prompt=["a", 1])
    assert error.param == "prompt[1]" and "string" in error.message
    error = refusal(CompletionRequest, prompt=[1, "a"])
    assert error.param == "prompt[1]" and "integer" in error.message


def test_fields_that_do_not_go_together_are_refused() -> None:
    assert refusal(ChatRequest, top_logprobs=3).param == "top_logprobs"
    assert refusal(ChatRequest, stream_options={"include_usage": True}).param == "stream_options"
    assert refusal(ChatRequest, stream=True, prompt_logprobs=1).param == "prompt_logprobs"
    assert refusal(CompletionRequest, echo=True, truncate_prompt_tokens=4).param == "truncate_prompt_tokens"
    assert refusal(CompletionRequest, prompt=["a"] * 9).param == "prompt"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe{}", b'{"a": NaN}', b"[" * 2000 + b"]" * 2000, b'{"a": "\\ud800"}', b'{"a":1}x', b'"\xc3"'],
)
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(data)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CompletionRequest, {"prompt": [0.5] * 1000}),
        (CompletionRequest, {"prompt": [[0.5] * 1000] * 10}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 1000}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["a"] * 1000}),
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, {"messages": MESSAGES, "tools": [1] * 1000}),
    ],
)
def test_a_list_is_given_up_at_its_first_wrong_item(model: type[RequestModel], fields: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        model.model_validate(fields)
    assert caught.value.error_count() <= 6, "one for each type that the value may have"


def test_an_object_of_very_many_fields_is_refused_before_each_is_looked_at() -> None:
    for body in ({str(number): 1 for number in range(20_000)}, {"a": [{str(n): 1 for n in range(20_000)}]}):
        with pytest.raises(ApiError, match="more than 16384 fields"):
            parsed(orjson.dumps(body))


def test_json_is_nested_64_deep_at_most() -> None:
    assert parsed(b"[" * 64 + b"]" * 64)
    with pytest.raises(ApiError, match="nested"):
        parsed(b"[" * 65 + b"]" * 65)


@pytest.mark.parametrize("body", [[], 5, "x", None])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(ApiError, match="must be a JSON object"):
        validated(ChatRequest, body)


def error_of(model: type[RequestModel], body: dict[str, Any]) -> ApiError | None:
    """What a body is refused with; None if it is taken."""
    try:
        asked = validated(model, body)
        if isinstance(asked, ChatRequest):
            chat_to_generate(asked)
        elif isinstance(asked, CompletionRequest):
            completion_to_generate(asked, 8)
    except ApiError as error:
        return error
    except SpecdecError as error:
        return from_specdec(error, CHAT_FIELD_NAMES)
    return None


NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "nonsense"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_any_object_is_taken_or_refused_with_an_error_of_ours(fields: dict[str, Any]) -> None:
    for model in MODELS:
        body = {**SMALL[model], **fields}
        try:
            body = orjson.loads(json.dumps(body))
        except orjson.JSONDecodeError:
            return
        error = error_of(model, body)
        assert error is None or error.status == 400
        assert error is None or json.loads(orjson.dumps(error.body))["error"]["message"]


@pytest.mark.parametrize("salt", ["", "x" * 129, 5])
def test_a_salt_is_a_short_text(salt: Any) -> None:
    assert refusal(ChatRequest, cache_salt=salt).param == "cache_salt"
