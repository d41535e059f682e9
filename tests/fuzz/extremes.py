"""Values at the ends of what a field can hold, beside them, and beyond."""

from __future__ import annotations

import math

from google.protobuf.descriptor import FieldDescriptor

LONG = 70_000
"""Bytes or entries: more than any frame of HTTP/2, cheap enough to send often."""
WHOLE = (0, 1, -1, 2, 127, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**31))
"""Cut to 64 bits on the wire: what does not fit the field is cut again by whoever reads it."""
REAL = (
    0.0, -0.0, 1.0, -1.0, 1e-45, 5e-324, 1e-40, 2.3e-308, 0.5, 1 + 1e-9, 3.4e38, -3.4e38, 1.8e308, -1.8e308,
    math.inf, -math.inf, math.nan, -math.nan,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "0", "\0", "\n", "a\r\nb", "\x1b[2J\x1b]0;x\a", "é", "你好 🙂", "\u202e\ufeff\u0000\ud7ff", "\uffff",
    "[/red]",
    "%s%n{}", "../../etc/passwd", "specdec", "*", "{a}:{b}", "<|eos|>", "𝕏" * 2000, "a" * 129, "a" * 257, "\t" * LONG,
    "a" * LONG,
)  # fmt: skip
NOT_UTF8 = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"abc\xe2\x82", b"\x80" * 300)
DATA = (b"", b"\0", b"\xff", b"\x08", b"\xff" * 20, b"\0" * 32, b"\0" * 36, b"\x08\x01" * 500, b"\xff" * LONG)
"""Of fields of bytes, which may hold messages."""


def numbers(field: FieldDescriptor) -> list[float]:
    """Numbers for a field that holds one."""
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return [value for value in REAL if not math.isfinite(value) or abs(value) <= 3.4e38]
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return list(REAL)
    if field.enum_type is not None:
        known = [value.number for value in field.enum_type.values]
        return [*known, max(known) + 1, -1, 2**31 - 1, -(2**31), 2**32]
    return list(WHOLE)


def contents(field: FieldDescriptor) -> list[bytes]:
    """Contents of a string or bytes field; strings that are not UTF-8 among them."""
    texts = [text.encode("utf-8", "surrogatepass") for text in TEXTS]
    return [*texts, *NOT_UTF8] if field.type == FieldDescriptor.TYPE_STRING else [*DATA, *NOT_UTF8]
