"""Colours text by the origin of its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from specdec.v1 import common_pb2, coordinator_pb2

ORIGIN_NAMES = {
    common_pb2.ORIGIN_PREFILL: "prefill",
    common_pb2.ORIGIN_DRAFT: "draft",
    common_pb2.ORIGIN_RECOVERED: "recovered",
    common_pb2.ORIGIN_BONUS: "bonus",
    common_pb2.ORIGIN_DECODE: "decode",
    common_pb2.ORIGIN_FORCED: "forced",
}
ORIGIN_STYLES = {
    common_pb2.ORIGIN_UNSPECIFIED: "",
    common_pb2.ORIGIN_PREFILL: "magenta",
    common_pb2.ORIGIN_DRAFT: "green",
    common_pb2.ORIGIN_RECOVERED: "red",
    common_pb2.ORIGIN_BONUS: "cyan",
    common_pb2.ORIGIN_DECODE: "yellow",
    common_pb2.ORIGIN_FORCED: "blue",
}
ORIGIN_MEANINGS = {
    common_pb2.ORIGIN_DRAFT: "an accepted token of the draft",
    common_pb2.ORIGIN_RECOVERED: "the target's token in place of a rejected one",
    common_pb2.ORIGIN_BONUS: "the target's token after a fully accepted proposal",
    common_pb2.ORIGIN_DECODE: "decoded without a proposal",
    common_pb2.ORIGIN_PREFILL: "first token",
    common_pb2.ORIGIN_FORCED: "the only token that a constraint allowed",
}
DRAFTER_STYLES = {
    "ngram": "blue",
    "suffix": "bright_blue",
    "prediction": "bright_magenta",
    "lookahead": "yellow",
    "layer_skip": "bright_yellow",
    "medusa": "bright_green",
    "eagle": "bright_green",
    "eagle3": "bright_green",
    "peagle": "bright_green",
    "dflash": "bright_green",
    "dspark": "bright_green",
    "mtp": "bright_cyan",
}
"""Colours of accepted tokens by the target's own drafter that proposed them."""
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def legend() -> Text:
    """Return one line per origin: its name in its colour and its meaning, and a line of drafters' names."""
    text = Text()
    for origin, meaning in ORIGIN_MEANINGS.items():
        text.append(f"  {ORIGIN_NAMES[origin]:<10}", style=ORIGIN_STYLES[origin])
        text.append(f"{meaning}\n", style="dim")
        if origin == common_pb2.ORIGIN_DRAFT:
            text.append("            the same by the target's own drafters:", style="dim")
            for name, style in DRAFTER_STYLES.items():
                text.append(f" {name}", style=style)
            text.append("\n")
    return text


@dataclass(slots=True)
class _Pending:
    text: str
    origin: common_pb2.Origin.ValueType
    drafter: str = ""

    @property
    def style(self) -> str:
        """The colour of its text."""
        return DRAFTER_STYLES.get(self.drafter) or ORIGIN_STYLES.get(self.origin, "")


class OriginPainter:
    """Splits one choice's text into spans of one origin each.

    Text may arrive later than its tokens (it may begin a stop string, or end inside a character), so tokens wait here
    for their text. All text is returned exactly once, in order.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        self._last = _Pending("", common_pb2.ORIGIN_UNSPECIFIED)

    def paint(self, delta: coordinator_pb2.ChoiceDelta) -> list[tuple[str, common_pb2.Origin.ValueType]]:
        """Return the delta's text as (span, origin) pairs."""
        return [(span, token.origin) for span, token in self._paint(delta)]

    def styled(self, delta: coordinator_pb2.ChoiceDelta) -> list[tuple[str, str]]:
        """Return the delta's text as pairs of a span and its colour, which names its origin or its drafter."""
        return [(span, token.style) for span, token in self._paint(delta)]

    def _paint(self, delta: coordinator_pb2.ChoiceDelta) -> list[tuple[str, _Pending]]:
        self._pending.extend(_Pending(token.text, token.origin, token.drafter) for token in delta.tokens)
        return list(self._spans(delta.text))

    def _spans(self, text: str) -> Iterator[tuple[str, _Pending]]:
        position = 0
        while position < len(text):
            rest = text[position:]
            if not self._pending:
                yield rest, self._last
                return
            token = self._pending[0]
            self._last = token
            if rest.startswith(token.text):
                self._pending.popleft()
                length = len(token.text)
            elif token.text.startswith(rest):
                token.text = token.text[len(rest) :]
                length = len(rest)
            else:
                length = self._skip_unmatched(rest)
            if length:
                yield rest[:length], token
                position += length

    def _skip_unmatched(self, rest: str) -> int:
        """Drop the first token and those after it up to one whose text occurs in `rest`; return where."""
        self._pending.popleft()
        while self._pending:
            token = self._pending[0]
            found = rest.find(token.text) if token.text and HALF_CHARACTER not in token.text else -1
            if found >= 0:
                return found
            self._pending.popleft()
        return len(rest)
