"""One table, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import rich.table
from rich import box
from rich.console import Console
from rich.markup import escape

_WIDE = 120
"""Columns of a terminal from which tables are padded."""


@dataclass(slots=True)
class Table:
    """Rows of text under a title; all columns but the first are right-aligned."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences below the table."""

    def add(self, *cells: object) -> None:
        """Append a row; `cell` formats the values."""
        self.rows.append([cell(value) for value in cells])

    def print(self, console: Console) -> None:
        """Print the table; words are broken only if the longest words of all columns do not fit."""
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
        """Widths with which the columns fit into `room` characters without broken words; None: rich decides."""
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
        """The table as Markdown."""
        lines = [f"### {self.title}", "", _line(self.columns)]
        lines.append(_line(["---", *["---:"] * (len(self.columns) - 1)]))
        lines += [_line([text.replace("|", "\\|") for text in row]) for row in self.rows]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)]) + "\n"


def cell(value: object) -> str:
    """A value as text: a number with three digits, a spread as median with quartiles, a dash for None."""
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
