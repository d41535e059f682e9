"""Display of foreign text, such as a model's, without terminal control characters and markup."""

from __future__ import annotations

from rich.text import Text

_KEPT = "\n\t"
_PICTURES = 0x2400
"""First of Unicode's pictures of the control characters below space."""
_DELETE, _DELETE_PICTURE = 0x7F, 0x2421
_HARMLESS = {code: chr(_PICTURES + code) for code in range(0x20) if chr(code) not in _KEPT}
_HARMLESS |= {_DELETE: chr(_DELETE_PICTURE), **dict.fromkeys(range(128, 160), "�")}


def harmless(text: str) -> str:
    """The text with pictures in place of control characters; lines and tabs stay."""
    return text.translate(_HARMLESS)


def cell(text: str, style: str = "") -> Text:
    """The text, for a table or a line."""
    return Text(harmless(text), style=style)
