"""Tensors of the Open Inference Protocol: text, flags and token ids, as typed contents or in Triton's binary form.

The binary form is little-endian; an element of BYTES has its length in 4 bytes before it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

from specdec.v1 import open_inference_pb2 as oip
from specdec.wire.errors import InvalidRequest

_FORMATS = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q"}
"""Codes of the fixed-size types in `struct`."""
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "BYTES": "bytes_contents",
}
_LENGTH = struct.Struct("<I")
_MOST_DIMENSIONS = 16
"""Of a shape: the product of thousands of sizes would take minutes."""
_MOST_ELEMENTS = 64
"""Elements of an input that is no list: one is read, and millions would take a second."""


def read_tensors(
    request: oip.ModelInferRequest, most_elements: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Sequence[Any]]:
    """Elements of all inputs by name, in their order; BYTES stay bytes.

    Args:
        request: the request.
        most_elements: elements that an input of numbers may have, by its name; others may have `_MOST_ELEMENTS`.

    Raises:
        InvalidRequest: an input comes twice, has another type than `_CONTENTS` names, too many elements, or not as
            many as its shape says.
    """
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InvalidRequest(
            "raw_input_contents", f"has {len(raws)} entries for {len(request.inputs)} inputs: send one for each"
        )
    found: dict[str, Sequence[Any]] = {}
    for index, tensor in enumerate(request.inputs):
        field = f"inputs[{index}]"
        if tensor.name in found:
            raise InvalidRequest(f"{field}.name", f"{tensor.name[:100]!r} comes twice")
        if tensor.datatype not in _CONTENTS:
            raise InvalidRequest(
                f"{field}.datatype", f"{tensor.datatype[:100]!r} is not read; the types are {', '.join(_CONTENTS)}"
            )
        if len(tensor.shape) > _MOST_DIMENSIONS:
            raise InvalidRequest(f"{field}.shape", f"has more than {_MOST_DIMENSIONS} dimensions")
        if any(size < 0 for size in tensor.shape):
            raise InvalidRequest(f"{field}.shape", "has a negative size")
        is_list = tensor.name in most_elements and tensor.datatype != "BYTES"
        count, most = prod(tensor.shape), most_elements[tensor.name] if is_list else _MOST_ELEMENTS
        if count > most:
            raise InvalidRequest(f"{field}.shape", f"says {count} elements; {tensor.name[:100]!r} has at most {most}")
        values: Sequence[Any] = getattr(tensor.contents, _CONTENTS[tensor.datatype])
        if raws:
            values = _from_raw(tensor.datatype, raws[index], count, f"raw_input_contents[{index}]")
        if len(values) != count:
            raise InvalidRequest(f"{field}.shape", f"says {count} elements, and there are {len(values)}")
        found[tensor.name] = values
    return found


def add_output(response: oip.ModelInferResponse, name: str, datatype: str, values: Sequence[Any]) -> None:
    """Append a tensor of one dimension to a response."""
    response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    if datatype == "BYTES":
        raw = b"".join(_LENGTH.pack(len(value)) + value for value in values)
    else:
        raw = struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)
    response.raw_output_contents.append(raw)


def _from_raw(datatype: str, raw: bytes, count: int, field: str) -> list[Any]:
    if datatype != "BYTES":
        size = struct.calcsize(f"<{_FORMATS[datatype]}")
        if len(raw) != count * size:
            raise InvalidRequest(field, f"has {len(raw)} bytes; {count} elements of {datatype} have {count * size}")
        return list(struct.unpack(f"<{count}{_FORMATS[datatype]}", raw))
    values: list[bytes] = []
    position = 0
    while position < len(raw):
        start = position + _LENGTH.size
        if len(values) == count or start > len(raw):
            raise InvalidRequest(field, f"is not {count} elements of BYTES, each behind its length in 4 bytes")
        position = start + _LENGTH.unpack_from(raw, position)[0]
        if position > len(raw):
            raise InvalidRequest(field, "ends within an element")
        values.append(raw[start:position])
    return values
