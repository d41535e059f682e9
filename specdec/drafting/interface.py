"""The interface of drafters: opened once per session, asked for trees below the last committed token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from specdec.drafting.corpus import Corpus

Place = Literal["target", "draft_service"]
ROOT = -1
"""The parent of an offer's first nodes: the last committed token."""


class OfNoUse(Exception):
    """Raised by a drafter that has found itself useless. It is not asked again; this is no fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """A drafter's needs and abilities."""

    needs_hidden_states: bool = False
    """Reads the target's hidden states of every committed token."""
    needs_engine: bool = False
    """Computes with the target's weights and blocks, for all sessions at once."""
    reads_drawn: bool = False
    """Reads the token that the target samples at every row of a step."""
    is_serial: bool = False
    """Computes one token after the other, so that its time grows with depth."""
    makes_trees: bool = True
    """False: chains only."""
    gives_distribution: bool = False
    """Reports the distribution q from which it samples; False: tokens are point masses."""
    has_target_vocabulary: bool = True
    """Uses the target's token ids."""
    places: frozenset[Place] = frozenset({"target"})
    """Processes in which it can run."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens as a tree: parents come before their children, -1 is the last committed token."""

    token_ids: list[int]
    parents: list[int]
    scores: list[float]
    """Each token's estimated probability in [0, 1] that the target takes it after its parent."""
    first_window_node: int | None = None
    """First node of the window, whose nodes are computed only to see the target's tokens there; None: no window."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bounds on a useful offer."""

    num_nodes: int
    depth: int
    is_chain: bool = False
    """Whether only a chain can be used."""


@dataclass(slots=True)
class Context:
    """One session's prompt and output, with indexes that look-up drafters share."""

    token_ids: Sequence[int]
    """Committed tokens; only ever appended to."""
    num_prompt_tokens: int
    salt: bytes = b""
    """The tenant's salt; drafters share nothing across salts."""
    prediction: Sequence[int] = ()
    """Text that the client expects."""
    _indexes: dict[int, Corpus] = field(default_factory=dict)

    def index(self, key_length: int) -> Corpus:
        """An index of the committed tokens by their last 1 or 2. A long prompt is indexed over several calls."""
        index = self._indexes.get(key_length)
        if index is None:
            index = self._indexes[key_length] = Corpus(key_length)
        index.follow(self.token_ids)
        return index


class SessionDrafter(Protocol):
    """A drafter's part of one session. Not thread-safe."""

    def propose(self, context: Context, room: Room) -> Offer | None:
        """A tree below the last committed token, or None."""

    def close(self, context: Context) -> None:
        """The session has ended."""


class DrawReader(Protocol):
    """An additional method of session drafters with `capabilities.reads_drawn`."""

    def drawn(self, tokens: Mapping[tuple[int, ...], int]) -> None:
        """Take the target's samples of the proposed step, by the uncommitted tokens before each."""


class Drafter(Protocol):
    """One source of proposals for all sessions."""

    name: str
    """Name of its method in settings, metrics and origins."""
    capabilities: Capabilities

    def open(self, context: Context) -> SessionDrafter | None:
        """Begin a session; None: the drafter has nothing to offer for it."""


class GrowingOffer:
    """An offer under construction. Equal tokens below one parent are one node."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._depths: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        """Whether no more nodes can be added."""
        return len(self._token_ids) >= self._room.num_nodes

    def add(self, parent: int, token_id: int, score: float) -> int | None:
        """Find or add a token below `parent`. Returns its node; None if the room is exhausted."""
        node = self._children.get((parent, token_id))
        if node is not None:
            return node
        depth = 1 if parent == ROOT else self._depths[parent] + 1
        if self.is_full or depth > self._room.depth:
            return None
        node = self._children[parent, token_id] = len(self._token_ids)
        self._token_ids.append(token_id)
        self._parents.append(parent)
        self._scores.append(score)
        self._depths.append(depth)
        return node

    def done(self) -> Offer | None:
        """The offer; None if it is empty."""
        return Offer(self._token_ids, self._parents, self._scores) if self._token_ids else None
