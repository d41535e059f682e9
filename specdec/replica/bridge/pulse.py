"""An engine process's signs of life: beats of a thread and turns of its loop, in memory that its servicer reads.

A turn costs two stores into memory and never blocks, even if the servicer does not look or the engine is busy. The
thread needs only the interpreter, four times a second for some microseconds: a process without beats is frozen, or
holds the interpreter.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import NamedTuple

BEAT_INTERVAL_S = 0.25
_NUM_WORDS = 4
NUM_BYTES = 8 * _NUM_WORDS
_BEATS, _TURNS, _LONGEST_NS, _EXPECTED_NS = range(_NUM_WORDS)


class PulseReading(NamedTuple):
    """A pulse at one moment."""

    num_beats: int
    turn: int
    """Odd while a turn runs; even between two, when the loop waits for frames."""
    longest_turn_s: float
    """Longest turn that has ended."""
    expected_turn_s: float
    """Estimated longest time of a full step, set after warm-up; 0: not set."""


class Pulse:
    """Shared words: one process beats and counts its turns, another reads. Each word has one writer."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: a shared file of NUM_BYTES; None: memory that no other process sees."""
        self._words = memoryview(mmap.mmap(-1 if fd is None else fd, NUM_BYTES)).cast("Q")
        self._began_ns = 0

    def start_beating(self) -> None:
        """Start the thread that beats until the process ends."""
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def begin_turn(self) -> None:
        """Mark the start of a turn."""
        self._began_ns = time.monotonic_ns()
        self._words[_TURNS] |= 1

    def end_turn(self) -> None:
        """Mark the end of a turn. Does nothing if no turn runs."""
        if not self._words[_TURNS] & 1:
            return
        took_ns = time.monotonic_ns() - self._began_ns
        if took_ns > self._words[_LONGEST_NS]:
            self._words[_LONGEST_NS] = took_ns
        self._words[_TURNS] += 1

    def expect_turn(self, seconds: float) -> None:
        """Set the estimated longest time of a full step."""
        self._words[_EXPECTED_NS] = int(seconds * 1e9)

    def read(self) -> PulseReading:
        """The pulse now."""
        words = self._words
        return PulseReading(words[_BEATS], words[_TURNS], words[_LONGEST_NS] * 1e-9, words[_EXPECTED_NS] * 1e-9)

    def _beat(self) -> None:
        while True:
            self._words[_BEATS] += 1
            time.sleep(BEAT_INTERVAL_S)


def new_pulse_file() -> int:
    """A file descriptor of anonymous memory for a Pulse, which the caller passes on and closes."""
    fd = os.memfd_create("specdec-pulse")
    os.ftruncate(fd, NUM_BYTES)
    return fd
