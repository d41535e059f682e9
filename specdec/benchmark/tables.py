"""One table, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import rich.table
from rich.console import Console
from rich.markup import escape


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
        """Show it on a terminal."""
        table = rich.table.Table(title=escape(self.title))
        for number, column in enumerate(self.columns):
            table.add_column(escape(column), justify="left" if number == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*map(escape, row))
        console.print(table)
        for note in self.notes:
            console.print(escape(note), style="dim")

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
