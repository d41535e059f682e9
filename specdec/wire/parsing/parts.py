"""The cost of parsing a peer's message, found without parsing.

Time and memory depend on the number of a message's parts, not on its bytes: eight million empty messages in a list are
16 MB on the wire, and take 400 MB and a second of CPU time, in which nothing else runs. So the parts of a long message
are counted first, up to a limit. Counting takes some hundredths of a second at most, and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

_MessageT = TypeVar("_MessageT", bound=Message)

MOST_PARTS = 32_768
"""Parts of a message: its fields and those of inner messages. Thousands of chat messages have half as many."""
_MOST_FRAME_PARTS = 2**17
"""Parts of a frame between processes: 4096 entries of one token have half as many."""
_PACKED_BYTES_PER_PART = 128
"""Bytes of a list of numbers that cost as much to parse as one part: 4 MiB of token ids fit into a message."""
_VARINT, _FIXED64, _LENGTH_DELIMITED, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_WIDTHS = {_FIXED64: 8, _FIXED32: 4, _START_GROUP: 0, _END_GROUP: 0}
_LONGEST_VARINT_BITS = 70
_CONTINUES = 0x80
"""Bit of a varint's byte that is set when another byte follows."""


class TooManyParts(Exception):
    """A message has too many parts; `field` is the path, without indices, of the field that exceeded the limit."""

    def __init__(self, field: str, most: int) -> None:
        super().__init__(f"more than {most} values in one message")
        self.field = field


class MalformedFrame(Exception):
    """A peer's frame cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    is_string: bool = False
    is_packed: bool = False
    message: Any = None
    """Descriptor of the inner message."""
    is_repeated: bool = False


def check_parts(message: Any, data: bytes, most: int = MOST_PARTS) -> None:
    """Raise TooManyParts for a message that takes long to parse. Malformed messages are left to the parser.

    Args:
        message: the descriptor of the message.
        data: the encoded message.
        most: the most parts that it may have.
    """
    if len(data) <= most:  # each takes a byte at least
        return
    path: list[str] = []
    try:
        _count(message, data, 0, len(data), most, path)
    except _Exceeded:
        raise TooManyParts(".".join(path) or "request", most) from None
    except (IndexError, KeyError):
        return


def read_frame(kind: type[_MessageT], data: bytes) -> _MessageT:
    """A frame of a peer, parsed. Raises MalformedFrame: it has too many parts, or does not parse."""
    try:
        check_parts(kind.DESCRIPTOR, data, _MOST_FRAME_PARTS)
        return kind.FromString(data)
    except TooManyParts as error:
        raise MalformedFrame(f"{error.field}: {error}") from None
    except DecodeError:
        raise MalformedFrame("the message does not parse") from None


def find_invalid_utf8(message: Any, data: bytes) -> str | None:
    """The path of the first string that is not UTF-8, as in sampling.stop[1]; None when there is none.

    For messages that do not parse, and have passed `check_parts`.
    """
    try:
        return _invalid_utf8(message, data, 0, len(data))
    except (IndexError, KeyError):
        return None


class _Exceeded(Exception):
    pass


@cache
def _length_delimited(message: Any) -> Mapping[int, _Field]:
    """A message's fields that may come with a length, by their tags."""
    fields = {}
    for field in message.fields:
        is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        fields[field.number << 3 | _LENGTH_DELIMITED] = _Field(
            field.name,
            is_string=field.type == FieldDescriptor.TYPE_STRING,
            is_packed=not is_text and field.message_type is None,
            message=field.message_type,
            is_repeated=field.is_repeated,
        )
    return fields


def _count(message: Any, data: bytes, at: int, end: int, left: int, path: list[str]) -> int:
    """The parts that are left of the limit. Raises _Exceeded, with the exceeding field in `path`."""
    fields = _length_delimited(message)
    while at < end:
        tag, at = _varint(data, at) if data[at] >= _CONTINUES else (data[at], at + 1)
        left -= 1
        if tag & 7 != _LENGTH_DELIMITED:
            if left < 0:
                raise _Exceeded
            at = _skip(data, at, tag & 7)
            continue
        length, at = _varint(data, at) if data[at] >= _CONTINUES else (data[at], at + 1)
        field = fields.get(tag)
        if field is not None:
            path.append(field.name)
            if field.is_packed:
                left -= length // _PACKED_BYTES_PER_PART
            elif field.message is not None and length and left >= 0:
                left = _count(field.message, data, at, at + length, left, path)
        if left < 0:
            raise _Exceeded
        if field is not None:
            path.pop()
        at += length
    return left


def _invalid_utf8(message: Any, data: bytes, at: int, end: int) -> str | None:
    fields = _length_delimited(message)
    num_seen: dict[str, int] = {}
    while at < end:
        tag, at = _varint(data, at)
        if tag & 7 != _LENGTH_DELIMITED:
            at = _skip(data, at, tag & 7)
            continue
        length, at = _varint(data, at)
        first, at = at, at + length
        field = fields.get(tag)
        if field is None or at > end:
            continue
        index = num_seen[field.name] = num_seen.get(field.name, -1) + 1
        path = f"{field.name}[{index}]" if field.is_repeated else field.name
        if field.is_string and not _is_utf8(data[first:at]):
            return path
        if field.message is not None and (below := _invalid_utf8(field.message, data, first, at)) is not None:
            return f"{path}.{below}"
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _skip(data: bytes, at: int, wire_type: int) -> int:
    """The index after a value without a length. Raises KeyError for an unknown wire type."""
    return _varint(data, at)[1] if wire_type == _VARINT else at + _WIDTHS[wire_type]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of the wire format, and the index of the next byte. Raises IndexError at the end of the data."""
    value = shift = 0
    while shift < _LONGEST_VARINT_BITS:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < _CONTINUES:
            break
        shift += 7
    return value, at
