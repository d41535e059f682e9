"""From a ModelInferRequest to a GenerateRequest, with the options of Triton's vLLM backend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from specdec.coordinator.open_inference.tensors import read_tensors
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import open_inference_pb2 as oip
from specdec.wire.errors import InvalidRequest, NotFound

VERSION = "1"
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_output_tokens": "UINT32",
    "num_input_tokens": "UINT32",
    "output_ids": "INT64",
}
"""Types of the outputs."""
INPUTS = {
    "text_input": "BYTES",
    "input_ids": "INT64",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_num_input_tokens": "BOOL",
}
"""Types of the inputs; `streaming` is another name of `stream`."""
_MOST_PARAMETERS_BYTES = 256 * 1024
"""Bytes of sampling_parameters, a schema among them."""
_MOST_VALUES = 20_000
"""Values of one parameter besides a schema: as many allowed tokens as there may be, and some. Each takes a microsecond
and more."""
_MOST_MARKS = 50_000
"""Commas and opening brackets of sampling_parameters: what these separate takes half a microsecond each to read."""
_MOST_DEPTH = 64
"""Depth of nested lists and objects, as in a conversation."""
_OTHER_NAMES = {"include_stop_str_in_output": "include_stop_in_output", "max_new_tokens": "max_tokens"}
_STRUCTURES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Keys of vLLM's guided_decoding and structured_outputs, and our constraint's."""
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "min_p": (0,),
    "top_k": (0, -1),
}
"""Values with which a parameter asks for nothing."""
_TRITON_PARAMETERS = frozenset({"triton_enable_empty_final_response", "binary_data", "priority", "timeout"})
"""Parameters of Triton's clients that concern no sampling."""


@dataclass(frozen=True, slots=True)
class InferCall:
    """A request in the coordinator's terms, and the form of its response."""

    generate: api.GenerateRequest
    is_streamed: bool
    echoes_prompt: bool
    outputs: tuple[str, ...]
    """Names of the asked outputs."""


def read_call(request: oip.ModelInferRequest, *, may_stream: bool, most_ids: int) -> InferCall:
    """Return the call of a request, whose prompt may have `most_ids` token ids.

    Raises:
        InvalidRequest: names the tensor or parameter.
        NotFound: the model has no such version.
    """
    check_version(request.model_version)
    tensors = read_tensors(request, {"input_ids": most_ids})
    unknown = sorted(tensors.keys() - INPUTS.keys() - {"streaming"})
    if unknown:
        raise InvalidRequest("inputs", f"{unknown[0][:100]!r} is not read; the inputs are {', '.join(INPUTS)}")
    is_streamed = _flag(tensors, "stream", False) or _flag(tensors, "streaming", False)
    if is_streamed and not may_stream:
        raise InvalidRequest("stream", "several responses need ModelStreamInfer")
    excludes = _flag(tensors, "exclude_input_in_output", is_streamed)
    if is_streamed and not excludes:
        raise InvalidRequest("exclude_input_in_output", "must be true where responses are streamed")
    generate = api.GenerateRequest(request_id="", model=request.model_name)
    if ("text_input" in tensors) == ("input_ids" in tensors):
        raise InvalidRequest("inputs", "send either text_input or input_ids")
    if "text_input" in tensors:
        generate.prompt = _text(tensors, "text_input")
    else:
        if not excludes:
            raise InvalidRequest("exclude_input_in_output", "must be true with input_ids")
        _put_ids(generate, tensors["input_ids"])
    _put_parameters(generate, _parameters(request, tensors))
    if is_streamed and generate.sampling.n > 1:
        raise InvalidRequest("sampling_parameters.n", "must be 1 where responses are streamed")
    outputs = _outputs(request, tensors)
    if "output_ids" in outputs and generate.sampling.n > 1:
        raise InvalidRequest("outputs", "output_ids needs n to be 1: choices differ in length")
    return InferCall(generate, is_streamed, not excludes, outputs)


def check_version(version: str) -> None:
    """Raises NotFound."""
    if version not in ("", VERSION):
        raise NotFound(f"model_version {version[:100]!r} does not exist: the only version is {VERSION}")


def _outputs(request: oip.ModelInferRequest, tensors: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    asked = [output.name for output in request.outputs] or [
        "text_output",
        *(name for name in OUTPUTS if _flag(tensors, f"return_{name}", False)),
    ]
    for index, name in enumerate(asked):
        if name not in OUTPUTS:
            raise InvalidRequest(
                f"outputs[{index}]", f"{name[:100]!r} is no output; the outputs are {', '.join(OUTPUTS)}"
            )
    return tuple(dict.fromkeys(asked))


def _one(tensors: Mapping[str, Sequence[Any]], name: str, kind: type) -> Any:
    values = tensors[name]
    if len(values) != 1 or not isinstance(values[0], kind):
        what = "text (BYTES)" if kind is bytes else "truth value (BOOL)"
        raise InvalidRequest(name, f"must be one {what}: send one request for each prompt")
    return values[0]


def _flag(tensors: Mapping[str, Sequence[Any]], name: str, absent: bool) -> bool:
    return _one(tensors, name, bool) if name in tensors else absent


def _text(tensors: Mapping[str, Sequence[Any]], name: str) -> str:
    try:
        return _one(tensors, name, bytes).decode()
    except UnicodeDecodeError:
        raise InvalidRequest(name, "is not UTF-8") from None


def _put_ids(generate: api.GenerateRequest, values: Sequence[Any]) -> None:
    generate.prompt_token_ids.SetInParent()
    if not values:
        return
    are_numbers = not isinstance(values[0], bool | bytes)  # all are of one type
    if not are_numbers or min(values) < 0 or max(values) >= 1 << 32:
        wrong = (index for index, value in enumerate(values) if not are_numbers or not 0 <= value < 1 << 32)
        raise InvalidRequest(f"input_ids[{next(wrong)}]", "is no token id")
    generate.prompt_token_ids.token_ids.extend(values)


def _parameters(request: oip.ModelInferRequest, tensors: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Sampling parameters: those of the request's own map, and over them those of the tensor."""
    found: dict[str, Any] = {}
    for name, value in request.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is not None and name not in _TRITON_PARAMETERS:
            found[name] = getattr(value, kind)
    if "sampling_parameters" in tensors:
        text = _text(tensors, "sampling_parameters")
        if len(text.encode()) > _MOST_PARAMETERS_BYTES:
            raise InvalidRequest("sampling_parameters", f"has more than {_MOST_PARAMETERS_BYTES} bytes")
        if sum(map(text.count, ",[{")) > _MOST_MARKS:
            raise InvalidRequest("sampling_parameters", f"has more than {_MOST_MARKS} commas, lists and objects")
        try:
            given = json.loads(text or "{}")
            if "\\ud" in text.lower():  # half of a surrogate pair is in no text of protobuf
                json.dumps(given, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("sampling_parameters", f"is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise InvalidRequest("sampling_parameters", "must be a JSON object")
        _check_values("sampling_parameters", given, inf)
        found |= given
    return found


def _put_parameters(generate: api.GenerateRequest, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        field = f"sampling_parameters.{name}"
        if value is None or _asks_nothing(name, value):
            continue
        if name in ("guided_decoding", "structured_outputs"):
            _parse(field, {"constraint": _constraint(field, value)}, generate.sampling)
        elif name in ("speculation", "prediction"):
            _parse(field, value, getattr(generate, name))
        elif name in ("cache_salt", "request_id"):
            if not isinstance(value, str):
                raise InvalidRequest(field, "must be a text")
            setattr(generate, name, value)
        else:
            known = _OTHER_NAMES.get(name, name)
            if known not in api.SamplingParams.DESCRIPTOR.fields_by_name:
                raise InvalidRequest(field, "is no sampling parameter")
            _parse(field, {known: [value] if known == "stop" and isinstance(value, str) else value}, generate.sampling)


def _asks_nothing(name: str, value: Any) -> bool:
    return any(value == none and isinstance(value, bool) == isinstance(none, bool) for none in _HARMLESS.get(name, ()))


def _constraint(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) != 1 or not value.keys() <= _STRUCTURES.keys():
        raise InvalidRequest(field, f"must be an object with one of {', '.join(_STRUCTURES)}")
    [(name, content)] = value.items()
    if name == "json" and not isinstance(content, str):
        content = json.dumps(content)
    if name == "choice":
        content = {"texts": content}
    return {_STRUCTURES[name]: content}


def _parse(field: str, value: Any, message: Any) -> None:
    _check_values(field, value, _MOST_VALUES)
    try:
        ParseDict(value, message)
    except (ParseError, TypeError, AttributeError, ValueError) as error:
        raise InvalidRequest(field, str(error).partition("\n")[0]) from None


def _check_values(field: str, value: Any, most: float) -> None:
    """Raises InvalidRequest for more than `most` values in lists and objects, or too deep ones."""
    level, num = [value], 0
    for _ in range(_MOST_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        num += sum(map(len, inner))
        if num > most:
            raise InvalidRequest(field, f"has more than {most:g} values")
        if not inner:
            return
        level = [item for items in inner for item in items]
    raise InvalidRequest(field, f"is nested deeper than {_MOST_DEPTH}")
