"""How long streams stand still."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]


@dataclass(slots=True)
class Stream:
    """One request that runs. Times are those of the clock, in seconds."""

    name: str
    moved_s: dict[int, float]
    """When each choice that has not ended last got a token; at first, when the request was sent."""
    reported_s: float | None = None
    """Of when on it has been told that it is stuck."""

    @property
    def oldest_s(self) -> float:
        """When the choice moved that has stood for longest."""
        return min(self.moved_s.values())


@dataclass(slots=True)
class Window:
    """The longest that each stream stood still, from a moment on."""

    start_s: float
    longest_s: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, since_s: float, now_s: float) -> None:
        """A choice that stood since then has moved, or is still standing now."""
        stood_s = now_s - max(since_s, self.start_s)
        self.longest_s[name] = max(self.longest_s.get(name, 0.0), stood_s)

    @property
    def worst_s(self) -> float:
        """The longest of all."""
        return max(self.longest_s.values(), default=0.0)


class Progress:
    """All streams that run, and the windows in which they are watched."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._streams: dict[str, Stream] = {}
        self._windows: list[Window] = []

    @property
    def streams(self) -> list[Stream]:
        """Those that run."""
        return list(self._streams.values())

    def begin(self, name: str, num_choices: int) -> None:
        """A request is sent."""
        now = self._clock()
        self._streams[name] = Stream(name, dict.fromkeys(range(num_choices), now))

    def move(self, name: str, choice: int, *, is_end: bool = False) -> None:
        """A choice got tokens, or its end."""
        stream, now = self._streams[name], self._clock()
        since_s = stream.moved_s.get(choice)
        if since_s is None:
            return
        for window in self._windows:
            window.add(name, since_s, now)
        stream.moved_s[choice] = now
        if is_end and len(stream.moved_s) > 1:  # the last one's end is followed by the request's
            del stream.moved_s[choice]

    def end(self, name: str) -> None:
        """A request has ended, be it with an error."""
        stream = self._streams.pop(name)
        for window in self._windows:
            window.add(name, stream.oldest_s, self._clock())

    def open_window(self) -> Window:
        """Watch from now on."""
        window = Window(self._clock())
        self._windows.append(window)
        return window

    def close_window(self, window: Window) -> None:
        """Watch no longer; streams that stand at this moment count with what they have stood so far."""
        self._windows.remove(window)
        for stream in self.streams:
            window.add(stream.name, stream.oldest_s, self._clock())

    def have_all_moved_since(self, start_s: float) -> bool:
        """Whether every choice of every stream that runs has got a token since then."""
        return all(stream.oldest_s >= start_s for stream in self.streams)

    def stuck(self, longer_than_s: float, since_s: float = 0.0) -> list[tuple[Stream, float]]:
        """Streams that have stood for longer, counted from `since_s` at the earliest, each told once."""
        now, found = self._clock(), []
        for stream in self.streams:
            stood_s = now - max(stream.oldest_s, since_s)
            if stood_s > longer_than_s and stream.reported_s != stream.oldest_s:
                stream.reported_s = stream.oldest_s
                found.append((stream, stood_s))
        return found
