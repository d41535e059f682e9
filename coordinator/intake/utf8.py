"""Why a request does not parse: which string is not UTF-8."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

_LENGTH_DELIMITED = 2
"""The wire type of strings and messages."""


def find_invalid_utf8(message: Any, data: bytes) -> str | None:
    """The path of the first string that is not UTF-8, as in sampling.stop[1]; None when there is none.

    `message` is the descriptor of what `data` should be. Only for messages that do not parse: it reads the wire
    format field by field.
    """
    try:
        fields = UnknownFieldSet(Empty.FromString(data))  # to a message without fields, all are unknown
    except DecodeError:
        return None
    num_seen: dict[str, int] = {}
    for unknown in (fields[number] for number in range(len(fields))):
        field = message.fields_by_number.get(unknown.field_number)
        if field is None or unknown.wire_type != _LENGTH_DELIMITED:
            continue
        index = num_seen[field.name] = num_seen.get(field.name, -1) + 1
        path = f"{field.name}[{index}]" if field.is_repeated else field.name
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(unknown.data):
            return path
        if field.message_type is not None:
            below = find_invalid_utf8(field.message_type, unknown.data)
            if below is not None:
                return f"{path}.{below}"
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
