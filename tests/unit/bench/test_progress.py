"""What is said while something is measured."""

from __future__ import annotations

import io

from rich.console import Console

from specdec.commands.measuring.progress import Progress


def test_where_no_terminal_is_progress_is_a_line_now_and_then() -> None:
    file = io.StringIO()
    with Progress(Console(file=file, width=40)) as progress:
        progress.part("measuring")
        for number in range(1000):
            progress.tell(f"{number} of 1000 requests, [bold]with speculation[/bold], run 1 of 3")
    lines = file.getvalue().splitlines()
    assert 1 <= len(lines) < 100
    assert lines[0] == "measuring: starting"
    assert all(line.startswith("measuring: ") for line in lines), "no line is broken in two"


def test_on_a_terminal_progress_is_one_line_that_changes() -> None:
    file = io.StringIO()
    with Progress(Console(file=file, width=80, force_terminal=True)) as progress:
        progress.tell("[1] of 2")
        progress.part("next")
    assert "next: starting" in file.getvalue()
