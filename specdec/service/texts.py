"""Text that people give: arguments, variables, files, standard input. It is UTF-8, and a byte order mark is no part.

Python hands over bytes of arguments and variables that are not UTF-8 as halves of surrogate pairs, which no protocol
carries.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Encodings by their byte order marks; UTF-32's begins with UTF-16's."""


class NotText(ValueError):
    """Bytes that are not UTF-8; the message says why, and quotes nothing."""


def decoded(data: bytes) -> str:
    """The text of a file or of standard input, with line feeds as ends of lines. Raises NotText."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        for mark, name in _OTHER_MARKS.items():
            if data.startswith(mark):
                raise NotText(f"is {name}: convert it to UTF-8 (iconv -f {name} -t UTF-8)") from None
        mark_bytes = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
        at = error.start + mark_bytes
        raise NotText(f"is not UTF-8 text: byte 0x{data[at]:02x} at position {at}") from None
    return io.StringIO(text, newline=None).read()


def read_text(path: Path) -> str:
    """The text of a file. Raises NotText and OSError."""
    return decoded(path.read_bytes())


def fault_of(value: object) -> str | None:
    """Why the texts in an argument's value cannot be used; None if they can, or if it has none.

    Texts are looked for in lists and mappings. Paths may have any bytes.
    """
    if isinstance(value, str):
        return None if value.isascii() else _fault(value)
    if isinstance(value, Mapping):
        return fault_of([*value.keys(), *value.values()])
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
        return next((fault for each in value if (fault := fault_of(each)) is not None), None)
    return None


def _fault(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        try:
            decoded(text.encode(errors="surrogateescape"))
        except NotText as fault:
            return str(fault)
        except UnicodeEncodeError:
            pass
        return f"has half of a surrogate pair at character {error.start}"
    return None
