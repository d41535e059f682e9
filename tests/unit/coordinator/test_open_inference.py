"""Requests of the Open Inference Protocol: tensors in both forms, parameters of Triton's vLLM backend, hostile ones."""

import json
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.coordinator.open_inference.requests import read_call
from specdec.coordinator.open_inference.responses import InferResponses
from specdec.coordinator.open_inference.tensors import add_output, read_tensors
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import open_inference_pb2 as oip
from specdec.wire.errors import InvalidRequest, NotFound
from tests.support.for_each import for_each

KINDS = {"text_input": "BYTES", "sampling_parameters": "BYTES", "input_ids": "INT64"}
FIELDS = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "INT64": "int64_contents"}


def infer(parameters: dict[str, Any] | None = None, **tensors: Any) -> oip.ModelInferRequest:
    """A request with typed contents."""
    request = oip.ModelInferRequest(model_name="m")
    if "input_ids" not in tensors:
        tensors.setdefault("text_input", [b"once"])
    if parameters is not None:
        tensors["sampling_parameters"] = [json.dumps(parameters).encode()]
    for name, values in tensors.items():
        datatype = KINDS.get(name, "BOOL")
        one = request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        getattr(one.contents, FIELDS[datatype]).extend(values)
    return request


def as_raw(request: oip.ModelInferRequest) -> oip.ModelInferRequest:
    """The same request in Triton's binary form."""
    raw = oip.ModelInferRequest()
    raw.CopyFrom(request)
    for one in raw.inputs:
        values = getattr(one.contents, FIELDS[one.datatype])
        match one.datatype:
            case "BYTES":
                content = b"".join(struct.pack("<I", len(value)) + value for value in values)
            case "BOOL":
                content = bytes(values)
            case _:
                content = struct.pack(f"<{len(values)}q", *values)
        raw.raw_input_contents.append(content)
        one.ClearField("contents")
    return raw


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
def test_both_forms_of_a_tensor_are_read_alike(texts: list[bytes], ids: list[int]) -> None:
    request = infer(text_input=texts, input_ids=ids, stream=[True])
    expected = {"text_input": texts, "input_ids": ids, "stream": [True]}
    assert read_tensors(request) == read_tensors(as_raw(request)) == expected


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=5))
def test_an_output_reads_as_it_was_written(texts: list[bytes]) -> None:
    response = oip.ModelInferResponse()
    add_output(response, "text_output", "BYTES", texts)
    again = oip.ModelInferRequest(raw_input_contents=response.raw_output_contents)
    again.inputs.add(name="text_output", datatype="BYTES", shape=response.outputs[0].shape)
    assert read_tensors(again) == {"text_output": texts}


@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary(max_size=40), max_size=3), st.lists(st.integers(-2, 9), max_size=3))
def test_no_binary_content_does_more_than_refuse(raws: list[bytes], shape: list[int]) -> None:
    request = oip.ModelInferRequest(raw_input_contents=raws)
    for index, datatype in enumerate(["BYTES", "INT32", "BOOL"][: len(raws)]):
        request.inputs.add(name=str(index), datatype=datatype, shape=shape)
    with suppress(InvalidRequest):
        assert len(read_tensors(request)) == len(raws)


def test_parameters_have_vllms_names_and_values_that_ask_for_nothing() -> None:
    given = {
        "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0, "best_of": 1, "use_beam_search": False, "n": 2,
        "include_stop_str_in_output": True, "max_tokens": 7, "seed": 3, "logit_bias": {"5": 1.0}, "stop": "end",
        "guided_decoding": {"json": {"type": "object"}}, "cache_salt": "s", "speculation": {"enabled": False},
    }  # fmt: skip
    call = read_call(infer(given), may_stream=False, most_ids=100)
    sampling = api.SamplingParams(
        temperature=0.5, top_p=0.9, stop=["end"], include_stop_in_output=True, max_tokens=7, seed=3,
        logit_bias={5: 1.0}, n=2,
    )  # fmt: skip
    sampling.constraint.json_schema = '{"type": "object"}'
    expected = api.GenerateRequest(model="m", prompt="once", sampling=sampling, cache_salt="s")
    expected.speculation.enabled = False
    assert call.generate == expected
    assert (call.is_streamed, call.echoes_prompt, call.outputs) == (False, True, ("text_output",))


def test_the_requests_own_parameters_count_and_the_tensor_overrides_them() -> None:
    request = infer({"max_tokens": 5})
    request.parameters["max_tokens"].int64_param = 9
    request.parameters["temperature"].double_param = 0.25
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    sampling = read_call(request, may_stream=False, most_ids=100).generate.sampling
    assert (sampling.max_tokens, sampling.temperature) == (5, 0.25)


def test_streams_leave_the_prompt_out_and_outputs_are_those_asked_for() -> None:
    request = infer(stream=[True], return_finish_reason=[True])
    call = read_call(request, may_stream=True, most_ids=100)
    assert (call.is_streamed, call.echoes_prompt, call.outputs) == (True, False, ("text_output", "finish_reason"))
    request.outputs.add(name="output_ids")
    assert read_call(request, may_stream=True, most_ids=100).outputs == ("output_ids",)


REFUSED: dict[str, tuple[oip.ModelInferRequest, str]] = {
    "two prompts": (infer(text_input=[b"a", b"b"]), "text_input"),
    "no prompt": (infer(input_ids=[1], text_input=[b"a"]), "inputs"),
    "not UTF-8": (infer(text_input=[b"\xff"]), "text_input"),
    "an id below 0": (infer(input_ids=[-1], exclude_input_in_output=[True]), "input_ids[0]"),
    "ids that are echoed": (infer(input_ids=[1]), "exclude_input_in_output"),
    "an unknown input": (infer(image=[True]), "inputs"),
    "a stream elsewhere": (infer(stream=[True]), "stream"),
    "no JSON": (infer(sampling_parameters=[b"{"]), "sampling_parameters"),
    "deep JSON": (infer(sampling_parameters=[b"[" * 100_000]), "sampling_parameters"),
    "a list": (infer(sampling_parameters=[b"[]"]), "sampling_parameters"),
    "a long text": (infer({"stop": "x" * 300_000}), "sampling_parameters"),
    "an unknown parameter": (infer({"lora_name": "x"}), "sampling_parameters.lora_name"),
    "beams": (infer({"use_beam_search": True}), "sampling_parameters.use_beam_search"),
    "a wrong type": (infer({"temperature": [1]}), "sampling_parameters.temperature"),
    "out of range": (infer({"max_tokens": -5}), "sampling_parameters.max_tokens"),
    "half a character": (infer({"cache_salt": "\ud800"}), "sampling_parameters"),
    "half a character in a name": (infer({"\ud800": 1}), "sampling_parameters"),
    "two structures": (infer({"guided_decoding": {"json": {}, "regex": "a"}}), "sampling_parameters.guided_decoding"),
    "more ids than a context has": (infer(input_ids=[1] * 101, exclude_input_in_output=[True]), "inputs[0].shape"),
    "a deep schema": (
        infer({"guided_decoding": {"json": json.loads('{"a":' * 200 + "1" + "}" * 200)}}), "sampling_parameters",
    ),
    "many values": (infer({"guided_decoding": {"json": {"enum": [1] * 60_000}}}), "sampling_parameters"),
    "many flags": (infer(stream=[True] * 65), "inputs[0].shape"),
    "values of a prediction": (
        infer({"prediction": {"token_ids": {"token_ids": [1] * 20_000}}}), "sampling_parameters.prediction",
    ),
    "allowed tokens": (infer({"allowed_token_ids": [1] * 30_000}), "sampling_parameters.allowed_token_ids"),
    "ids of two choices": (infer({"n": 2}, return_output_ids=[True]), "inputs"),
}  # fmt: skip


def test_a_shape_of_many_sizes_is_refused_before_they_are_multiplied() -> None:
    request = infer()
    request.inputs[0].shape[:] = [2**62] * 500_000
    with pytest.raises(InvalidRequest, match="dimensions"):
        read_call(request, may_stream=False, most_ids=100)


def test_a_streamed_response_counts_its_own_tokens() -> None:
    call = read_call(infer(stream=[True], return_num_output_tokens=[True]), may_stream=True, most_ids=100)
    responses, counts = InferResponses(call, "r"), list[int]()
    tokens = [api.OutputToken(id=1), api.OutputToken(id=2)]
    for chunk in (api.ChoiceDelta(text="a", tokens=tokens), api.ChoiceDelta(text="b", tokens=tokens[:1])):
        response = responses.take(api.GenerateResponse(delta=chunk))
        assert response is not None
        counts.append(struct.unpack("<I", response.raw_output_contents[1])[0])
    assert counts == [2, 1]


@for_each("name", list(REFUSED))
def test_what_cannot_be_done_is_refused_by_name(name: str) -> None:
    request, field = REFUSED[name]
    for form in (request, as_raw(request)):
        with pytest.raises(InvalidRequest) as caught:
            read_call(form, may_stream=False, most_ids=100)
        assert caught.value.field == field


def test_output_ids_of_several_choices_and_other_versions_are_refused() -> None:
    request = infer({"n": 2})
    request.outputs.add(name="output_ids")
    with pytest.raises(InvalidRequest, match="n to be 1"):
        read_call(request, may_stream=False, most_ids=100)
    with pytest.raises(NotFound, match="only version is 1"):
        read_call(oip.ModelInferRequest(model_version="2"), may_stream=False, most_ids=100)
