"""What a drafter is: it is told of a session once, and asked for a tree below its last committed token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from specdec.drafting.corpus import Corpus

Place = Literal["target", "draft_service"]
ROOT = -1
"""The parent of an offer's first nodes: the last committed token."""


class OfNoUse(Exception):
    """A drafter has found out that it brings nothing: it is not asked any more, which is no fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a drafter needs and gives, as its registry entry states it."""

    needs_hidden_states: bool = False
    """Of the target, for every committed token."""
    needs_engine: bool = False
    """It computes with the target's own weights and blocks, for all sessions at once."""
    reads_drawn: bool = False
    """What the target draws at every row of a step."""
    is_serial: bool = False
    """It computes one token after the other, so that its time grows with depth."""
    makes_trees: bool = True
    """Else chains only."""
    gives_distribution: bool = False
    """Its tokens are drawn from a q that it tells; else each is a point mass."""
    has_target_vocabulary: bool = True
    """Its ids are the target's."""
    places: frozenset[Place] = frozenset({"target"})
    """Where it can run."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens as a tree: parents come before their children, -1 is the last committed token."""

    token_ids: list[int]
    parents: list[int]
    scores: list[float]
    """Of each, in [0, 1]: estimated probability that the target takes it if it took its parent."""
    first_window_node: int | None = None
    """From here on nodes are computed, however unlikely, for what the target draws there; None: there are none."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much of an offer may be of use."""

    num_nodes: int
    depth: int
    is_chain: bool = False
    """Branches are of no use."""


@dataclass(slots=True)
class Context:
    """Prompt and output of one session, and what drafters share that look things up in it."""

    token_ids: Sequence[int]
    """Committed tokens; only ever appended to."""
    num_prompt_tokens: int
    salt: bytes = b""
    """Of the tenant: nothing is shared between two."""
    prediction: Sequence[int] = ()
    """Text that the client expects."""
    _indexes: dict[int, Corpus] = field(default_factory=dict)

    def index(self, key_length: int) -> Corpus:
        """The committed tokens, to be searched by their last 1 or 2. A long prompt is taken in over several calls."""
        index = self._indexes.get(key_length)
        if index is None:
            index = self._indexes[key_length] = Corpus(key_length)
        index.follow(self.token_ids)
        return index


class SessionDrafter(Protocol):
    """A drafter's part of one session. Used from one thread."""

    def propose(self, context: Context, room: Room) -> Offer | None:
        """A tree below the last committed token; None where nothing comes to mind."""

    def close(self, context: Context) -> None:
        """The session has ended."""


class DrawReader(Protocol):
    """What a session's drafter has besides, where `capabilities.reads_drawn`."""

    def drawn(self, tokens: Mapping[tuple[int, ...], int]) -> None:
        """In the step that it was asked for the target drew these, by the uncommitted tokens before each."""


class Drafter(Protocol):
    """One source of proposals for all sessions."""

    name: str
    """Of its method, in settings, metrics and origins."""
    capabilities: Capabilities

    def open(self, context: Context) -> SessionDrafter | None:
        """Begin with a session; None: there is nothing it could do for it."""


class GrowingOffer:
    """An offer under construction: nodes are added while there is room; equal children of one parent are one node."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._depths: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        """Whether no node can be added."""
        return len(self._token_ids) >= self._room.num_nodes

    def add(self, parent: int, token_id: int, score: float) -> int | None:
        """The node of a token below `parent`, there already or new; None where there is no room for it."""
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
