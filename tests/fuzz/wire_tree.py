"""Encoded protobuf messages as trees that can be changed at one place, into what no library would write.

A tree is a list of entries in wire order. Packed fields are unpacked, which every parser has to take. What a tree says
need not make sense: lengths and tags are written as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

VARINT, FIXED64, BYTES, START_GROUP, END_GROUP, FIXED32 = range(6)
RAW = -1
"""Of an entry whose value is written as it is, without a tag."""
_FIXED64_TYPES = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64)
_FIXED32_TYPES = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32)
_MASK = 2**64 - 1


@dataclass(slots=True)
class Entry:
    """One field as it is on the wire."""

    number: int
    wire_type: int
    value: int | bytes | Tree
    """Varints and fixed ones as unsigned numbers; a tree for a message."""
    field: FieldDescriptor | None = None
    """None: unknown to the message."""


Tree = list[Entry]


def wire_type_of(field: FieldDescriptor) -> int:
    """How one value of a field is written."""
    if field.type in _FIXED64_TYPES:
        return FIXED64
    if field.type in _FIXED32_TYPES:
        return FIXED32
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE):
        return BYTES
    return VARINT


def number_on_wire(field: FieldDescriptor, value: float) -> int:
    """A number as the field has it on the wire, whether the field can hold it or not."""
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return int.from_bytes(struct.pack("<d", value), "little")
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return int.from_bytes(struct.pack("<f", value), "little")
    whole = int(value)
    if field.type in (FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64):
        return ((whole << 1) ^ (whole >> 63)) & _MASK
    return whole & _MASK


def tree_of(message: Message) -> Tree:
    """The tree of a message."""
    return parse(message.SerializeToString(), message.DESCRIPTOR)


def parse(data: bytes, descriptor: Descriptor) -> Tree:
    """The tree of an encoded message that is well formed."""
    return list(_entries(data, descriptor))


def encode(tree: Tree) -> bytes:
    """The bytes that a tree stands for."""
    return b"".join(map(_encode_entry, tree))


def varint(number: int) -> bytes:
    """The shortest encoding of a number below 2^64."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def tag(number: int, wire_type: int) -> bytes:
    """What an entry begins with."""
    return varint(number << 3 | wire_type)


def _encode_entry(entry: Entry) -> bytes:
    if entry.wire_type == RAW and isinstance(entry.value, bytes):
        return entry.value
    head, value = tag(entry.number, entry.wire_type), entry.value
    if isinstance(value, list):
        value = encode(value)
    if isinstance(value, bytes):
        return head + varint(len(value)) + value if entry.wire_type == BYTES else head + value
    match entry.wire_type:
        case _ if entry.wire_type == FIXED64:
            return head + (value & _MASK).to_bytes(8, "little")
        case _ if entry.wire_type == FIXED32:
            return head + (value & 0xFFFFFFFF).to_bytes(4, "little")
        case _:
            return head + varint(value & _MASK)


def _entries(data: bytes, descriptor: Descriptor) -> Iterator[Entry]:
    position = 0
    while position < len(data):
        head, position = _read_varint(data, position)
        number, wire_type = head >> 3, head & 7
        field = descriptor.fields_by_number.get(number)
        if wire_type == BYTES:
            length, position = _read_varint(data, position)
            content = data[position : position + length]
            position += length
            if field is not None and field.message_type is not None:
                yield Entry(number, BYTES, parse(content, field.message_type), field)
            elif field is not None and wire_type_of(field) != BYTES:
                yield from _unpacked(content, field)
            else:
                yield Entry(number, BYTES, content, field)
        else:
            value, position = _read_number(data, position, wire_type)
            yield Entry(number, wire_type, value, field)


def _unpacked(content: bytes, field: FieldDescriptor) -> Iterator[Entry]:
    position, wire_type = 0, wire_type_of(field)
    while position < len(content):
        value, position = _read_number(content, position, wire_type)
        yield Entry(field.number, wire_type, value, field)


def _read_number(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    if wire_type == VARINT:
        return _read_varint(data, position)
    end = position + (8 if wire_type == FIXED64 else 4)
    return int.from_bytes(data[position:end], "little"), end


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position
