"""Progress of a prompt's log-probabilities from the target to the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import position_bytes

_WINDOW_BYTES = 512 * 1024
"""Bytes that a target may send ahead of the client, some 2000 positions with 20 alternatives. It bounds both the memory
for a slow client and the work between two credits."""
MOST_JOINED_BYTES = 3584 * 1024
"""Bytes in one chunk for clients that accept only one; gRPC's default limit is 4 MiB."""
_CREDIT_STEPS = 4
"""Credit messages per window."""


@dataclass(slots=True, eq=False)
class PromptProgress:
    """Progress of one choice. A position is that of the token whose log-probability is meant."""

    num_top: int
    """Alternatives per position."""
    end: int
    """Number of the prompt's tokens."""
    arrived: int = 1
    """Position below which all have arrived; the prompt's first token has none."""
    is_joined: bool = False
    """The client gets all in one chunk."""
    written: int = field(init=False)
    """Position below which the client has them."""
    credit: int = field(init=False)
    """Position below which the target may compute them."""
    _joined: list[pb.PositionLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrived = max(1, self.arrived)
        self.written = self.arrived
        self.credit = self.arrived + self._window

    @property
    def _window(self) -> int:
        return self.end if self.is_joined else max(1, _WINDOW_BYTES // position_bytes(self.num_top))

    @property
    def is_complete(self) -> bool:
        """All have arrived."""
        return self.arrived >= self.end

    @property
    def is_starved(self) -> bool:
        """The target waits for credit, and so for the client."""
        return not self.is_complete and self.arrived >= self.credit

    def ask(self, body: pb.OpenSession) -> None:
        """Ask the target for those that have not arrived."""
        if not self.is_complete:
            body.num_prompt_logprobs = self.num_top
            body.prompt_logprobs_start = self.arrived
            body.prompt_logprobs_credit = self.credit

    def fault_of(self, start: int, positions: Sequence[pb.PositionLogprobs]) -> str | None:
        """Why positions do not continue what has arrived, or None."""
        if not 1 <= start <= self.arrived or start + len(positions) > self.end:
            return f"prompt_logprobs are from {start} to {start + len(positions)}, expected from {self.arrived}"
        if any(len(position.top) > self.num_top for position in positions):
            return f"prompt_logprobs have more than {self.num_top} alternatives"
        return None

    def take(self, start: int, positions: Sequence[pb.PositionLogprobs]) -> Sequence[pb.PositionLogprobs]:
        """Take a faultless part; returns the positions to send to the client now, which end at `arrived`."""
        new = positions[self.arrived - start :]
        self.arrived += len(new)
        if not self.is_joined:
            return new
        self._joined.extend(new)
        if not self.is_complete:
            return ()
        joined, self._joined = self._joined, []
        return joined

    def wrote(self, position: int) -> bool:
        """The client has those below a position; returns whether to send new credit."""
        self.written = max(self.written, position)
        credit = self.written + self._window
        if self.is_complete or credit - self.credit < max(1, self._window // _CREDIT_STEPS):
            return False
        self.credit = credit
        return True
