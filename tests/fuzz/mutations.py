"""All that can be changed at one place of an encoded message: extreme numbers first, then what is no message."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz.extremes import LONG, contents, numbers
from tests.fuzz.wire_tree import (
    BYTES,
    END_GROUP,
    FIXED64,
    RAW,
    START_GROUP,
    VARINT,
    Entry,
    Tree,
    encode,
    number_on_wire,
    tag,
    tree_of,
    varint,
    wire_type_of,
)

_REPEATS = (2, 65, LONG)
_UNKNOWN = 2047
"""A field number that no message of ours has."""
_DEPTH = 500
_MOST_BYTES = 4 * 2**20
"""Of one mutated message: what is larger is refused by gRPC, which is tested once and not by chance."""
_NOT_MESSAGES = (b"\xff", b"\x00", b"\x08", b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 11, b"\x0b\x0b\x0c")


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one message."""

    what: str
    """For people: where, and what."""
    apply: Callable[[], bytes]
    """The changed message."""


def mutations(message: Message) -> list[Mutation]:
    """Every change at one place, extreme numbers first."""
    tree = tree_of(message)
    found = [*_numbers(tree, tree, ""), *_contents(tree, tree, ""), *_absent(tree, tree, message.DESCRIPTOR, "")]
    return [*found, *_shapes(tree, tree, ""), *_spoilt(encode(tree))]


def mutated(rng: random.Random, message: Message) -> Mutation:
    """One change; each kind of change is as likely as the others, however many there are of it."""
    tree = tree_of(message)
    kinds = [
        list(_numbers(tree, tree, "")),
        list(_contents(tree, tree, "")),
        list(_absent(tree, tree, message.DESCRIPTOR, "")),
        list(_shapes(tree, tree, "")),
        list(_spoilt(encode(tree))),
        [_noise(rng, encode(tree))],
    ]
    return rng.choice(rng.choice([kind for kind in kinds if kind]))


def _numbers(root: Tree, tree: Tree, path: str) -> Iterator[Mutation]:
    for index, entry in enumerate(tree):
        here = _name(path, entry, index, tree)
        if isinstance(entry.value, list):
            yield from _numbers(root, entry.value, here)
        elif isinstance(entry.value, int) and entry.field is not None:
            for number in numbers(entry.field):
                value = number_on_wire(entry.field, number)
                yield Mutation(f"{here} = {number!r}", _put(root, tree, index, [_with(entry, value)]))


def _contents(root: Tree, tree: Tree, path: str) -> Iterator[Mutation]:
    for index, entry in enumerate(tree):
        here = _name(path, entry, index, tree)
        if isinstance(entry.value, list):
            yield from _contents(root, entry.value, here)
        elif isinstance(entry.value, bytes) and entry.field is not None:
            for content in contents(entry.field):
                yield Mutation(f"{here} = {_short(content)}", _put(root, tree, index, [_with(entry, content)]))


def _absent(root: Tree, tree: Tree, descriptor: Descriptor, path: str) -> Iterator[Mutation]:
    """Fields that are not there: those of another choice of a oneof, too."""
    present = {entry.number for entry in tree}
    for field in descriptor.fields:
        if field.number in present:
            continue
        here, end = f"{path}.{field.name}".lstrip("."), len(tree)
        if field.message_type is not None:
            yield Mutation(f"{here} = an empty one", _put(root, tree, end, [Entry(field.number, BYTES, b"", field)]))
        elif wire_type_of(field) == BYTES:
            for content in contents(field):
                new = Entry(field.number, BYTES, content, field)
                yield Mutation(f"{here} = {_short(content)}", _put(root, tree, end, [new]))
        else:
            for number in numbers(field):
                new = Entry(field.number, wire_type_of(field), number_on_wire(field, number), field)
                yield Mutation(f"{here} = {number!r}", _put(root, tree, end, [new]))
    for index, entry in enumerate(tree):
        if isinstance(entry.value, list) and entry.field is not None and entry.field.message_type is not None:
            yield from _absent(root, entry.value, entry.field.message_type, _name(path, entry, index, tree))


def _shapes(root: Tree, tree: Tree, path: str) -> Iterator[Mutation]:
    """Fields that go, come more often, or are written as another type."""
    for index, entry in enumerate(tree):
        here = _name(path, entry, index, tree)
        yield Mutation(f"no {here}", _put(root, tree, index, []))
        for times in _REPEATS if entry.field is not None and entry.field.is_repeated else (2,):
            if times * len(encode([entry])) <= _MOST_BYTES:
                repeated = Entry(entry.number, RAW, encode([entry]) * times)
                yield Mutation(f"{here} {times} times", _put(root, tree, index, [repeated]))
        other = VARINT if entry.wire_type == BYTES else BYTES
        as_other = Entry(entry.number, other, 3 if other == VARINT else b"\x01\x02", entry.field)
        yield Mutation(f"{here} of wire type {other}", _put(root, tree, index, [as_other]))
        as_fixed = Entry(entry.number, FIXED64, 2**64 - 1, entry.field)
        yield Mutation(f"{here} of wire type {FIXED64}", _put(root, tree, index, [as_fixed]))
        yield Mutation(f"{here} unknown", _put(root, tree, index, [Entry(_UNKNOWN, entry.wire_type, entry.value)]))
        if isinstance(entry.value, list):
            for content in _NOT_MESSAGES:
                yield Mutation(f"{here} = {_short(content)}", _put(root, tree, index, [_with(entry, content)]))
            yield from _shapes(root, entry.value, here)


def _spoilt(data: bytes) -> Iterator[Mutation]:
    """What is no message, or one with more in it than anybody knows."""
    for end in sorted({0, 1, len(data) // 2, max(0, len(data) - 1)}):
        yield Mutation(f"cut to {end} bytes", lambda end=end: data[:end])  # type: ignore[misc]
    for content in _NOT_MESSAGES:
        yield Mutation(f"followed by {_short(content)}", lambda content=content: data + content)  # type: ignore[misc]
    yield Mutation("followed by an unknown number", lambda: data + tag(_UNKNOWN, VARINT) + varint(2**64 - 1))
    yield Mutation("followed by many unknown numbers", lambda: data + (tag(_UNKNOWN, VARINT) + b"\x01") * LONG)
    yield Mutation(
        "many unknown numbers, then no UTF-8",
        lambda: (tag(_UNKNOWN, VARINT) + b"\x01") * LONG + tag(1, BYTES) + b"\x01\xff",
    )
    nested = tag(_UNKNOWN, START_GROUP) * _DEPTH + tag(_UNKNOWN, END_GROUP) * _DEPTH
    yield Mutation("followed by nested groups", lambda: data + nested)
    yield Mutation("twice", lambda: data + data)


def _noise(rng: random.Random, data: bytes) -> Mutation:
    """Bits turned at random, or nothing but noise."""
    seed = rng.getrandbits(32)

    def apply() -> bytes:
        own = random.Random(seed)
        if not data or own.random() < 0.2:
            return own.randbytes(own.randrange(200))
        spoilt = bytearray(data)
        for _ in range(own.randrange(1, 8)):
            spoilt[own.randrange(len(spoilt))] ^= 1 << own.randrange(8)
        return bytes(spoilt)

    return Mutation(f"noise {seed}", apply)


def _put(root: Tree, tree: Tree, index: int, entries: Tree) -> Callable[[], bytes]:
    """The whole message with these in place of what is at an index; past the end they are added."""

    def apply() -> bytes:
        kept = tree[index : index + 1]
        tree[index : index + 1] = entries
        try:
            return encode(root)
        finally:
            tree[index : index + len(entries)] = kept

    return apply


def _with(entry: Entry, value: int | bytes) -> Entry:
    return Entry(entry.number, entry.wire_type, value, entry.field)


def _name(path: str, entry: Entry, index: int, tree: Tree) -> str:
    field: FieldDescriptor | None = entry.field
    name = str(entry.number) if field is None else field.name
    if field is not None and field.is_repeated:
        name = f"{name}[{sum(other.number == entry.number for other in tree[:index])}]"
    return f"{path}.{name}".lstrip(".")


def _short(content: bytes) -> str:
    return repr(content) if len(content) <= 40 else f"{content[:16]!r}... of {len(content)} bytes"
