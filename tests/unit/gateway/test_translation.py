"""From HTTP requests to gRPC requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.errors import ApiError, from_specdec, param_of
from specdec.gateway.api.problems import validated
from specdec.gateway.translation.chat_request import CHAT_FIELD_NAMES, chat_to_generate, echoed, parsers
from specdec.gateway.translation.completion_request import COMPLETION_FIELD_NAMES, completion_to_generate
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire import errors as rpc


def chat(**fields: Any) -> api.GenerateRequest:
    return chat_to_generate(validated(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], **fields}))


def completion(**fields: Any) -> list[api.GenerateRequest]:
    return completion_to_generate(validated(CompletionRequest, {"prompt": "x", **fields}), 100)


def test_what_is_not_said_stays_open() -> None:
    sampling = chat().sampling
    assert sampling == api.SamplingParams()
    assert not chat().HasField("speculation")
    assert completion()[0].sampling == api.SamplingParams(max_tokens=16)


def test_every_sampling_field_arrives() -> None:
    sampling = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": 3},
        seed=9,
        n=2,
        stop="end",
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        skip_special_tokens=False,
        truncate_prompt_tokens=50,
        prompt_logprobs=2,
        max_completion_tokens=30,
        max_tokens=20,
        logprobs=True,
        top_logprobs=4,
    ).sampling
    assert sampling == api.SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={7: 3.0}, seed=9, n=2,
        stop=["end"], stop_token_ids=[4], include_stop_in_output=True, ignore_eos=True,
        min_tokens=2, skip_special_tokens=False, truncate_prompt_tokens=50, prompt_logprobs=2,
        max_tokens=30, logprobs=4,
    )  # fmt: skip


def test_values_that_mean_off_elsewhere_are_off() -> None:
    assert chat(top_k=-1).sampling.top_k == 0
    assert chat(seed=-1).sampling.seed == 2**64 - 1
    assert chat(logprobs=True).sampling.logprobs == 0
    assert not chat(logprobs=False).sampling.HasField("logprobs")


def test_speculation_and_priority_arrive() -> None:
    wanted = {"enabled": True, "verify_mode": "rejection", "max_draft_tokens": 0, "time_per_token_ms": 2}
    wanted["rejection_sample_method"] = "block"
    body = chat(speculation=wanted, priority=-3, model="m")
    assert body.speculation.enabled and body.speculation.verify_mode == pb.VERIFY_MODE_REJECTION
    assert body.speculation.rejection_sample_method == pb.REJECTION_SAMPLE_METHOD_BLOCK
    assert body.speculation.HasField("max_draft_tokens") and body.speculation.time_per_token_ms == 2.0
    assert (body.priority, body.model) == (-3, "m")


def test_all_kinds_of_prompts_become_a_request_each() -> None:
    assert [body.prompt for body in completion(prompt=["a", "b"])] == ["a", "b"]
    assert [list(body.prompt_token_ids.token_ids) for body in completion(prompt=[5, 6])] == [[5, 6]]
    assert [list(body.prompt_token_ids.token_ids) for body in completion(prompt=[[5], [6, 7]])] == [[5], [6, 7]]


def test_scoring_asks_for_log_probabilities_of_the_prompt_and_one_token_at_least() -> None:
    (body,) = completion(prompt=[5, 6], echo=True, logprobs=1, max_tokens=0)
    assert (body.sampling.max_tokens, body.sampling.prompt_logprobs, body.sampling.logprobs) == (1, 1, 1)
    assert not completion(echo=True)[0].sampling.HasField("prompt_logprobs")


def test_a_conversation_arrives_with_its_parts_and_variables() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": parts}],
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        add_generation_prompt=False,
        documents=[{"text": "d"}],
        chat_template="{{ messages }}",
    )
    assert json.loads(body.messages.documents_json) == [{"text": "d"}]
    assert body.messages.chat_template == "{{ messages }}"
    assert [message.role for message in body.messages.messages] == ["system", "user"]
    told = {"enable_thinking": False, "reasoning_effort": "low"}
    assert json.loads(body.messages.template_variables_json) == told
    assert body.messages.HasField("add_generation_prompt") and not body.messages.add_generation_prompt


def test_an_effort_switches_thoughts_unless_the_template_is_told_otherwise() -> None:
    def told(**fields: Any) -> Any:
        return json.loads(chat(messages=[{"role": "user", "content": "u"}], **fields).messages.template_variables_json)

    assert told(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    for effort in ("minimal", "high", "xhigh", "max"):
        assert told(reasoning_effort=effort)["thinking"] is told(reasoning_effort=effort)["enable_thinking"] is True
    own = {"enable_thinking": True}
    assert told(reasoning_effort="none", chat_template_kwargs=own) == {"reasoning_effort": "none", **own}
    asked = validated(ChatRequest, {"messages": [{"role": "user", "content": "u"}], "reasoning_effort": "none"})
    parser = parsers(asked, "deepseek_r1", "none")()
    assert [delta.content for delta in parser.push("yes")] == ["yes"]


def test_only_the_assistants_own_words_are_echoed() -> None:
    said = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "so"}]
    assert echoed(validated(ChatRequest, {"messages": said, "echo": True})) == "so"
    assert echoed(validated(ChatRequest, {"messages": said})) == ""
    assert echoed(validated(ChatRequest, {"messages": said[:1], "echo": True})) == ""


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.top_p", "top_p"),
        ("sampling.stop[3]", "stop[3]"),
        ("sampling.include_stop_in_output", "include_stop_str_in_output"),
        ("sampling.logprobs", "top_logprobs"),
        ("messages.messages[2].content", "messages[2].content"),
        ("messages", "messages"),
        ("messages.tools_json", "tools"),
        ("messages.template_variables_json.a", "chat_template_kwargs.a"),
        ("messages.documents_json[0]", "documents[0]"),
        ("messages.chat_template", "chat_template"),
        ("speculation.max_draft_tokens", "speculation.max_draft_tokens"),
    ],
)
def test_fields_of_grpc_have_names_of_http(field: str, param: str) -> None:
    assert param_of(field, CHAT_FIELD_NAMES) == param


def test_a_bad_prompt_token_is_in_the_prompt() -> None:
    assert param_of("prompt_token_ids.token_ids[7]", COMPLETION_FIELD_NAMES) == "prompt[7]"
    assert param_of("prompt_token_ids", COMPLETION_FIELD_NAMES) == "prompt"


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (rpc.InvalidRequest("sampling.stop", "too many"), 400, "invalid_value", "stop"),
        (rpc.Unauthenticated("no"), 401, "invalid_api_key", None),
        (rpc.PermissionDenied("no"), 403, "permission_denied", None),
        (rpc.ModelNotFound("no"), 404, "model_not_found", "model"),
        (rpc.RequestExists("is"), 409, "request_exists", "request_id"),
        (rpc.Overloaded("full", retry_after_s=2.2), 429, "rate_limit_exceeded", None),
        (rpc.Unimplemented("no"), 501, "not_implemented", None),
        (rpc.NoTarget("none"), 503, "service_unavailable", None),
        (rpc.DeadlineExceeded("late"), 504, "deadline_exceeded", None),
        (rpc.Internal("oh"), 500, "internal_error", None),
        (rpc.DataLoss("oh"), 500, "internal_error", None),
    ],
)
def test_every_error_has_a_status_and_a_code(
    error: rpc.SpecdecError, status: int, code: str, param: str | None
) -> None:
    told = from_specdec(error, {})
    assert (told.status, told.code, told.param) == (status, code, param)


def test_errors_that_pass_say_when_to_try_again() -> None:
    headers = from_specdec(rpc.Overloaded("full", retry_after_s=2.2), {}).headers
    assert headers == {"retry-after": "3", "retry-after-ms": "2200"}, "the coordinator has spread it"
    for error, least, most in (
        (rpc.Overloaded("full", retry_after_s=0.0), 500, 1500),
        (rpc.NotReady("soon", retry_after_s=0.0), 500, 1500),
        (rpc.NotReady("soon", retry_after_s=10.0), 10_000, 15_000),
    ):
        told = [from_specdec(error, {}).headers for _ in range(200)]
        waits_ms = [int(each["retry-after-ms"]) for each in told]
        assert least <= min(waits_ms) < least + 0.1 * (most - least)
        assert most >= max(waits_ms) > most - 0.1 * (most - least), "a crowd does not come back together"
        assert all(int(each["retry-after"]) == -(-int(each["retry-after-ms"]) // 1000) for each in told)
    assert from_specdec(rpc.Overloaded("used up", reason="QUOTA_EXCEEDED"), {}).type == "tokens"
    assert from_specdec(rpc.Internal("oh"), {}).headers == {}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_tools_are_shown_to_the_template_and_their_marks_kept_in_the_text() -> None:
    said = [{"role": "user", "content": "u"}]
    asked = validated(ChatRequest, {"messages": said, "tools": [TOOL]})
    body = chat_to_generate(asked, "mistral")
    assert '"name": "f"' in body.messages.tools_json or '"name":"f"' in body.messages.tools_json
    assert body.sampling.HasField("skip_special_tokens") and not body.sampling.skip_special_tokens
    assert not chat_to_generate(asked, "hermes").sampling.HasField("skip_special_tokens")
    none = validated(ChatRequest, {"messages": said, "tools": [TOOL], "tool_choice": "none"})
    assert not chat_to_generate(none, "mistral").messages.tools_json


@pytest.mark.parametrize("parser", ["mistral", "harmony"])
def test_marks_of_reasoning_are_kept_in_the_text_without_tools_too(parser: str) -> None:
    asked = validated(ChatRequest, {"messages": [{"role": "user", "content": "u"}]})
    sampling = chat_to_generate(asked, reasoning_parser=parser).sampling
    assert sampling.HasField("skip_special_tokens") and not sampling.skip_special_tokens
    assert not chat_to_generate(asked, reasoning_parser="qwen3").sampling.HasField("skip_special_tokens")


def test_tools_that_nothing_reads_are_refused() -> None:
    asked = validated(ChatRequest, {"messages": [{"role": "user", "content": "u"}], "tools": [TOOL]})
    with pytest.raises(ApiError) as caught:
        parsers(asked, "none", "none")
    assert caught.value.param == "tools"
    (first, *_) = parsers(asked, "none", "hermes")().push('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert first.tool_call is not None and first.tool_call.name == "f"


def test_thoughts_are_told_apart_from_the_answer() -> None:
    asked = validated(ChatRequest, {"messages": [{"role": "user", "content": "u"}]})
    parser = parsers(asked, "think", "none")()
    deltas = [*parser.push("<think>so</think>yes"), *parser.finish()]
    assert "".join(delta.reasoning for delta in deltas) == "so"
    assert "".join(delta.content for delta in deltas) == "yes"
