"""One table, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import rich.table
from rich import box
from rich.console import Console
from rich.markup import escape

_WIDE = 120
"""Columns of a terminal from which there is room to spare."""


@dataclass(slots=True)
class Table:
    """Rows of text under a title. Numbers stand on the right."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences below it."""

    def add(self, *cells: object) -> None:
        """Append a row; see `cell` for what becomes of values."""
        self.rows.append([cell(value) for value in cells])

    def print(self, console: Console) -> None:
        """Show it on a terminal; no word is cut in two where all columns have room for their longest one."""
        padding = 1 if console.width >= _WIDE else 0
        table = rich.table.Table(
            title=escape(self.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding)
        )
        num_gaps = len(self.columns) - 1
        widths = self._widths(console.width - 2 - num_gaps * (1 + 2 * padding))
        for number, (column, width) in enumerate(zip(self.columns, widths, strict=True)):
            table.add_column(escape(column), justify="left" if number == 0 else "right", overflow="fold", width=width)
        for row in self.rows:
            table.add_row(*map(escape, row))
        console.print(table)
        for note in self.notes:
            console.print(escape(note), style="dim")
        console.print()

    def _widths(self, room: int) -> Sequence[int | None]:
        """Of columns that fit into so many characters by breaking lines between words; None: as they come."""
        texts = list(zip(self.columns, *self.rows, strict=True))
        wanted = [max(map(len, column)) for column in texts]
        widths = [max(len(word) for text in column for word in text.split()) for column in texts]
        spare = room - sum(widths)
        if spare < 0 or sum(wanted) <= room:
            return [None] * len(texts)
        for _ in range(spare):
            widths[max(range(len(texts)), key=lambda number: wanted[number] - widths[number])] += 1
        return widths

    def markdown(self) -> str:
        """As GitHub shows it."""
        lines = [f"### {self.title}", "", _line(self.columns)]
        lines.append(_line(["---", *["---:"] * (len(self.columns) - 1)]))
        lines += [_line([text.replace("|", "\\|") for text in row]) for row in self.rows]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)]) + "\n"


def cell(value: object) -> str:
    """Text of a value: three digits of a number, the median of a spread with its quartiles, a dash for nothing."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return str(value)
        case float():
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
        case {"median": median, "q1": low, "q3": high}:
            return cell(median) if low == high else f"{cell(median)} ({cell(low)} to {cell(high)})"
        case Mapping() | "":
            return "-"
    return str(value)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
