"""vLLM's gRPC: messages as the routers' package has them, requests and hostile ones, responses of all kinds."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto.generated import common_pb2 as smg_common

from specdec.coordinator.vllm_engine.requests import decimal, read_call
from specdec.coordinator.vllm_engine.responses import VllmResponses
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import vllm_engine_pb2 as vllm
from specdec.wire.errors import InvalidRequest
from tests.support.for_each import for_each

TYPES = {
    "VllmSamplingParams": smg.SamplingParams,
    "VllmChoiceConstraint": smg.ChoiceConstraint,
    "VllmTokenizedInput": smg.TokenizedInput,
    "VllmGenerateRequest": smg.GenerateRequest,
    "VllmTopLogprobs": smg.TopLogProbs,
    "VllmOutputLogprobs": smg.OutputLogProbs,
    "VllmInputTokenLogprob": smg.InputTokenLogProb,
    "VllmInputLogprobs": smg.InputLogProbs,
    "VllmGenerateChunk": smg.GenerateStreamChunk,
    "VllmGenerateComplete": smg.GenerateComplete,
    "VllmGenerateResponse": smg.GenerateResponse,
    "VllmHealthCheckResponse": smg.HealthCheckResponse,
    "VllmAbortRequest": smg.AbortRequest,
    "VllmAbortResponse": smg.AbortResponse,
    "VllmModelInfo": smg.GetModelInfoResponse,
    "VllmServerInfo": smg.GetServerInfoResponse,
    "VllmLoadsRequest": smg.GetLoadsRequest,
    "VllmLoadsResponse": smg.GetLoadsResponse,
    "VllmSchedulerLoad": smg.SchedulerLoad,
    "VllmTokenizerChunk": smg_common.GetTokenizerChunk,
    "VllmEmptyRequest": smg_common.GetTokenizerRequest,
}
"""Our messages, and those of the package."""
READ = ("VllmSamplingParams", "VllmGenerateRequest", "VllmTokenizedInput", "VllmChoiceConstraint", "VllmLoadsRequest")
"""Messages that routers send: no field of theirs may be unknown here."""


def on_wire(field: FieldDescriptor) -> tuple[Any, ...]:
    """What both sides must agree on; a message that is refused as a whole is bytes here."""
    is_nested = field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_BYTES)
    of = field.containing_oneof
    group = None if of is None or of.name.startswith("_") else of.name
    return field.number, is_nested or field.type, field.is_repeated, group


@for_each("name", sorted(vllm.DESCRIPTOR.message_types_by_name))
def test_every_message_is_that_of_the_routers_package_on_the_wire(name: str) -> None:
    if name.endswith("Entry"):
        return
    ours, theirs = vllm.DESCRIPTOR.message_types_by_name[name], TYPES[name].DESCRIPTOR
    for field in ours.fields:
        assert on_wire(field) == on_wire(theirs.fields_by_name[field.name]), field.full_name
    if name in READ:
        assert {field.name for field in theirs.fields} == {field.name for field in ours.fields}


def asked(sampling: dict[str, Any] | None = None, **fields: Any) -> vllm.VllmGenerateRequest:
    """A request, made by the package and read by us."""
    if "text" not in fields:
        fields.setdefault("tokenized", smg.TokenizedInput(input_ids=[5, 6, 7], original_text="?"))
    sent = smg.GenerateRequest(sampling_params=smg.SamplingParams(**sampling or {}), **fields)
    return vllm.VllmGenerateRequest.FromString(sent.SerializeToString())


def test_what_is_absent_has_the_default_of_vllm_and_not_of_the_model() -> None:
    found = read_call(asked())
    assert list(found.prompt_token_ids.token_ids) == [5, 6, 7]
    sampling = found.sampling
    assert [sampling.HasField(name) for name in ("temperature", "top_p", "top_k", "min_p", "n")] == [True] * 5
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1, 1, 0, 1)
    assert not any(sampling.HasField(name) for name in ("seed", "max_tokens", "logprobs", "constraint"))
    assert read_call(asked(text="once")).prompt == "once"
    assert read_call(asked({"temperature": 0.0})).sampling.temperature == 0


def test_every_sampling_parameter_is_taken() -> None:
    given = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "frequency_penalty": 0.1,
        "presence_penalty": -0.2, "repetition_penalty": 1.1, "max_tokens": 9, "min_tokens": 2, "stop": ["a", "b"],
        "stop_token_ids": [4], "ignore_eos": True, "n": 2, "logprobs": 3, "prompt_logprobs": 0, "seed": -1,
        "truncate_prompt_tokens": 8, "logit_bias": {3: -1.5}, "skip_special_tokens": True,
    }  # fmt: skip
    found = read_call(asked(given)).sampling
    expected = api.SamplingParams(**{**given, "seed": 2**64 - 1})  # type: ignore[arg-type]
    assert found == expected


@for_each(
    "given, expected",
    [
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": "start: 1"}, {"grammar": "start: 1"}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        ({"json_object": True}, {"json_object": True}),
        ({"choice": smg.ChoiceConstraint(choices=["a", "b"])}, {"choice": pb.TextChoices(texts=["a", "b"])}),
        ({"grammar_from_first_token": True, "regex": "a"}, {"regex": "a"}),
    ],
)
def test_every_constraint_is_taken(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read_call(asked(given)).sampling.constraint == pb.Constraint(**expected)


def test_no_json_object_is_no_constraint() -> None:
    assert not read_call(asked({"json_object": False})).sampling.HasField("constraint")


@for_each(
    "sampling, fields, field",
    [
        ({"logprobs": -1}, {}, "sampling_params.logprobs"),
        ({"prompt_logprobs": -1}, {}, "sampling_params.prompt_logprobs"),
        ({"truncate_prompt_tokens": -1}, {}, "sampling_params.truncate_prompt_tokens"),
        ({"logit_bias": {-5: 1.0}}, {}, "sampling_params.logit_bias"),
        ({}, {"data_parallel_rank": 1}, "data_parallel_rank"),
        ({}, {"mm_inputs": smg.MultimodalInputs(mm_hashes=["a"])}, "mm_inputs"),
        ({}, {"extra_mm_inputs": [smg.MultimodalInputs()]}, "extra_mm_inputs"),
        ({}, {"media_refs": smg.MediaRefs(items=[smg.MediaRef(url="http://a")])}, "media_refs"),
        ({}, {"kv_transfer_params": smg.KvTransferParams(remote_port=1)}, "kv_transfer_params"),
        ({}, {"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({}, {"tokenized": None}, "input"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(sampling: Any, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_call(asked(sampling, **fields))
    assert caught.value.field == field


@given(st.floats(width=32, allow_nan=False))
def test_a_short_float_becomes_the_shortest_decimal_with_the_same_bits(value: float) -> None:
    found = decimal(value)
    assert struct.pack("<f", found) == struct.pack("<f", value)
    assert len(repr(found)) <= max(len(repr(value)), 12)


def test_decimals_of_clients_come_back() -> None:
    for shown in (0.7, 0.9, 0.95, 1.1, 0.05, 1e-05, 2.0, 0.123456):
        assert decimal(struct.unpack("<f", struct.pack("<f", shown))[0]) == shown
    assert decimal(float("inf")) == float("inf")
    assert decimal(float("nan")) != decimal(float("nan"))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_hostile_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(InvalidRequest):
        try:
            request = vllm.VllmGenerateRequest.FromString(data)
        except Exception:
            return
        read_call(request)


def position(logprob: float, *top: int) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        logprob=logprob, top=[pb.TokenLogprob(token_id=token, logprob=-float(token)) for token in top]
    )


def chunks(num_choices: int = 1) -> list[api.GenerateResponse]:
    """A call with log-probabilities: two deltas for each choice, one without tokens between them."""
    deltas = [
        api.ChoiceDelta(index=index, text="x", tokens=[api.OutputToken(id=token, logprobs=position(-0.5, token, 1))])
        for token in (8, 9)
        for index in range(num_choices)
    ]
    deltas.insert(num_choices, api.ChoiceDelta(text="held"))
    ended = [
        api.ChoiceFinished(
            index=index,
            reason=pb.FINISH_REASON_STOP,
            stop_token_id=9,
            stats=api.SpeculationStats(num_accepted=1, num_proposed=4),
        )
        for index in range(num_choices)
    ]
    prompt = api.PromptLogprobs(token_ids=[5, 6, 7], positions=[position(-1.0, 2), position(-2.0, 3)])
    return [
        api.GenerateResponse(started=api.GenerateStarted(num_prompt_tokens=3)),
        api.GenerateResponse(prompt_logprobs=prompt),
        *(api.GenerateResponse(delta=delta) for delta in deltas),
        *(api.GenerateResponse(choice_finished=end) for end in ended),
        api.GenerateResponse(finished=api.GenerateFinished(usage=api.Usage(cached_tokens=2))),
    ]


def told(sampling: api.SamplingParams, *, is_streamed: bool, num_choices: int = 1) -> list[Any]:
    """The responses, read by the routers' package."""
    responses = VllmResponses(api.GenerateRequest(sampling=sampling), is_streamed=is_streamed)
    found = [response for chunk in chunks(num_choices) for response in responses.take(chunk)]
    return [smg.GenerateResponse.FromString(response.SerializeToString()) for response in found]


def test_one_response_has_all_tokens_with_their_logprobs_and_the_prompts() -> None:
    sampling = api.SamplingParams(logprobs=2, prompt_logprobs=1, stop_token_ids=[9])
    [only] = told(sampling, is_streamed=False)
    complete = only.complete
    assert list(complete.output_ids) == [8, 9]
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", 9)
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 2, 2)
    assert (complete.spec_accepted_tokens, complete.spec_draft_tokens) == (1, 4)
    assert list(complete.output_logprobs.token_ids) == [8, 9]
    assert list(complete.output_logprobs.token_logprobs) == [-0.5, -0.5]
    assert [list(top.token_ids) for top in complete.output_logprobs.top_logprobs] == [[8, 1], [9, 1]]
    prompt = complete.input_logprobs
    assert list(prompt.token_ids) == [5, 6, 7]
    assert [one.HasField("value") for one in prompt.token_logprobs] == [False, True, True]
    assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [2], [3]]


def test_a_stream_has_each_token_and_the_prompt_once_and_an_end_for_each_choice() -> None:
    found = told(api.SamplingParams(logprobs=0, prompt_logprobs=0), is_streamed=True, num_choices=2)
    parts = [one.chunk for one in found if one.HasField("chunk")]
    ends = [one.complete for one in found if one.HasField("complete")]
    assert [(part.index, list(part.token_ids)) for part in parts] == [(0, [8]), (1, [8]), (0, [9]), (1, [9])]
    assert [part.HasField("input_logprobs") for part in parts] == [True, True, False, False]
    assert all(not part.output_logprobs.top_logprobs and part.output_logprobs.token_logprobs for part in parts)
    assert [(end.index, list(end.output_ids), end.completion_tokens) for end in ends] == [(0, [], 2), (1, [], 2)]
    assert not any(end.HasField("output_logprobs") or end.HasField("input_logprobs") for end in ends)


def test_an_end_of_sequence_is_no_matched_stop() -> None:
    [only] = told(api.SamplingParams(), is_streamed=False)
    assert only.complete.WhichOneof("matched_stop") is None
    assert not only.complete.HasField("output_logprobs")
