"""Writes a stream of chunks to the terminal."""

from __future__ import annotations

from collections import defaultdict
from types import TracebackType

from google.protobuf import json_format
from rich.console import Console
from rich.status import Status
from rich.text import Text

from specdec.commands.views.origins import OriginPainter
from specdec.commands.views.tables import cell, harmless
from specdec.v1 import coordinator_pb2


class StreamView:
    """Context manager that shows text on `output`, everything else on `notes`.

    Choice 0 streams; later choices are held back until the earlier ones have ended.
    """

    def __init__(self, output: Console, notes: Console, *, show_origin: bool, as_json: bool = False) -> None:
        self._output, self._notes = output, notes
        self._show_origin, self._as_json = show_origin, as_json
        self._painters: dict[int, OriginPainter] = defaultdict(OriginPainter)
        self._held: dict[int, Text] = defaultdict(Text)
        self._finished: set[int] = set()
        self._current = 0
        self._waiting: Status | None = None

    def __enter__(self) -> StreamView:
        if self._notes.is_terminal and not self._as_json:
            self._waiting = self._notes.status("waiting for the first token")
            self._waiting.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_waiting()

    def show(self, chunk: coordinator_pb2.GenerateResponse) -> None:
        """Show the next chunk."""
        if self._as_json:
            line = json_format.MessageToJson(chunk, indent=None, preserving_proto_field_name=True)
            self._output.out(line, highlight=False)
            return
        match chunk.WhichOneof("chunk"):
            case "started":
                for notice in chunk.started.notices:
                    self._notes.print(cell(f"note: {notice}", style="yellow"))
            case "delta":
                self._show_delta(chunk.delta)
            case "choice_finished":
                self._finished.add(chunk.choice_finished.index)
                self._advance()

    def _show_delta(self, delta: coordinator_pb2.ChoiceDelta) -> None:
        text = Text()
        if self._show_origin:
            for span, style in self._painters[delta.index].styled(delta):
                text.append(self._shown(span), style=style)
        else:
            text.append(self._shown(delta.text))
        if delta.index == self._current:
            self._write(text)
        else:
            self._held[delta.index].append_text(text)

    def _shown(self, text: str) -> str:
        """Text for the output: a terminal gets no control characters of the model, a file the text as it is."""
        return harmless(text) if self._output.is_terminal else text

    def _advance(self) -> None:
        """Turn to the next choices while the current one has ended."""
        while self._current in self._finished:
            self._write(Text("\n"))
            self._current += 1
            if self._current in self._held or self._current in self._finished:
                self._write(Text(f"--- choice {self._current}\n", style="dim"))
                self._write(self._held.pop(self._current, Text()))

    def _write(self, text: Text) -> None:
        if text.plain:
            self._stop_waiting()
            self._output.print(text, end="", soft_wrap=True)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None
