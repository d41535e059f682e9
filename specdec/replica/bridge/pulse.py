"""An engine process's signs of life: beats of a thread, turns of its loop and steps of its ranks, in memory that its
servicer reads.

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
MOST_RANKS = 64
_NUM_WORDS = 5
NUM_BYTES = 8 * (_NUM_WORDS + MOST_RANKS)
_BEATS, _TURNS, _LONGEST_NS, _EXPECTED_NS, _NUM_RANKS = range(_NUM_WORDS)


class PulseReading(NamedTuple):
    """A pulse at one moment."""

    num_beats: int
    turn: int
    """Odd while a turn runs; even between two, when the loop waits for frames."""
    longest_turn_s: float
    """Longest turn that has ended."""
    expected_turn_s: float
    """Estimated longest time of a full step, set after warm-up; 0: not set."""
    rank_marks: tuple[int, ...] = ()
    """Mark of each rank: twice the steps that it has launched, and one more while it launches another."""


class Pulse:
    """Shared words: one process beats and counts its turns, another reads. Each word has one writer."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: a shared file of NUM_BYTES; None: memory that no other process sees."""
        self.fd = fd
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

    def expect_ranks(self, num_ranks: int) -> None:
        """Set the number of ranks whose marks are read."""
        self._words[_NUM_RANKS] = num_ranks

    def mark_rank(self, rank: int, mark: int) -> None:
        """Set a rank's mark. Raises IndexError or ValueError if a number is out of range."""
        if not 0 <= rank < MOST_RANKS:
            raise IndexError(f"rank {rank}")
        self._words[_NUM_WORDS + rank] = mark

    @property
    def marks(self) -> tuple[int, ...]:
        """Marks of `MOST_RANKS` ranks, there or not."""
        return tuple(self._words[_NUM_WORDS:])

    def read(self) -> PulseReading:
        """The pulse now."""
        words = self._words
        marks = self.marks[: words[_NUM_RANKS]]
        times_s = words[_LONGEST_NS] * 1e-9, words[_EXPECTED_NS] * 1e-9
        return PulseReading(words[_BEATS], words[_TURNS], *times_s, marks)

    def _beat(self) -> None:
        while True:
            self._words[_BEATS] += 1
            time.sleep(BEAT_INTERVAL_S)


def new_pulse_file() -> int:
    """A file descriptor of anonymous memory for a Pulse, which the caller passes on and closes."""
    fd = os.memfd_create("specdec-pulse")
    os.ftruncate(fd, NUM_BYTES)
    return fd
