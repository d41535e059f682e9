"""The journal's state of one running request, and its unwritten tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from specdec.coordinator.sessions.session import Request
from specdec.store.interface import JournalRecord, JournalWrite, Lease, NewRequest, StoreLimits

_log = structlog.get_logger(__name__)
_MAX_TOKENS = StoreLimits().max_tokens


@dataclass(slots=True, eq=False)
class JournalEntry:
    """One running request.

    The tokens are its sessions': only their origins are kept here, one byte each. So unwritten tokens take no further
    memory while the store is away.
    """

    request: Request
    new: NewRequest
    generation: int | None = None
    """Generation of its lease; None: it is not in the store."""
    last_lease: Lease | None = None
    """Its lease, or its last one."""
    joins_at_s: float | None = 0.0
    """Monotonic time from which it may be put into the store; None: never."""
    is_closed: bool = False
    """It has ended."""
    origins: list[bytearray] = field(init=False)
    """Origins of each choice's output tokens."""
    num_stored: list[int] = field(init=False)
    """Output tokens of each choice that the store has."""

    def __post_init__(self) -> None:
        self.origins = [bytearray() for _ in range(self.new.num_choices)]
        self.num_stored = [0] * self.new.num_choices

    @property
    def lease(self) -> Lease | None:
        """The lease held now; None while the request is not in the store."""
        return None if self.generation is None else self.last_lease

    @property
    def was_held(self) -> bool:
        """It has been in the store, so another holder has taken it over."""
        return self.last_lease is not None

    @property
    def is_behind(self) -> bool:
        """Whether the store lacks tokens."""
        return any(
            num_stored < min(len(origins), _MAX_TOKENS)
            for num_stored, origins in zip(self.num_stored, self.origins, strict=True)
        )

    def may_join(self, now_s: float) -> bool:
        """Whether it may be put into the store at monotonic time `now_s`."""
        return self.joins_at_s is not None and self.joins_at_s <= now_s

    def give_up(self, cause: str) -> None:
        """Keep it out of the store; the request itself continues."""
        self.joins_at_s = None
        _log.warning("request_not_journalled", request_id=self.request.key.request_id, cause=cause)

    def held(self, generation: int) -> None:
        """The store has begun the request, and holds no tokens of it yet."""
        self.generation = generation
        self.last_lease = Lease(self.request.key, self.new.owner_id, generation)
        self.num_stored = [0] * self.new.num_choices

    def writes(self, most_tokens: int) -> Iterator[JournalWrite]:
        """The next writes, of `most_tokens` tokens at most; none while the request is not in the store."""
        if self.generation is None:
            return
        for choice, start in enumerate(self.num_stored):
            stop = min(len(self.origins[choice]), start + most_tokens, _MAX_TOKENS)
            if start >= stop:
                continue
            most_tokens -= stop - start
            yield JournalWrite(
                key=self.request.key,
                owner_id=self.new.owner_id,
                generation=self.generation,
                choice=choice,
                start=start,
                token_ids=self._output(choice, start, stop),
                origins=self.origins[choice][start:stop],
            )

    def record(self) -> JournalRecord:
        """The record of a store that is up to date."""
        tokens = [tuple(self._output(choice, 0, len(origins))) for choice, origins in enumerate(self.origins)]
        return JournalRecord(
            owner_id=self.new.owner_id,
            generation=self.generation or 0,
            seed=self.new.seed,
            params=self.new.params,
            token_ids=tuple(tokens),
            origins=tuple(map(tuple, self.origins)),
            is_ended=False,
        )

    def _output(self, choice: int, start: int, stop: int) -> Sequence[int]:
        if start == stop:
            return ()
        session = self.request.sessions[choice]
        return session.token_ids[session.num_prompt_tokens + start : session.num_prompt_tokens + stop]
