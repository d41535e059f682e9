"""Masks of the tokens that a constraint allows after the committed tokens and after each node of a tree."""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt
from google.rpc import code_pb2
from llguidance import LLMatcher

from specdec.constraints.grammar.source import shown
from specdec.constraints.limits.faults import GrammarError
from specdec.service.memory_limit import allocated_bytes

MaskWords = npt.NDArray[np.uint32]
_WEIGHED_CALLS = 32
"""Calls per call whose growth of memory is looked at, at random: a look takes as long as a mask."""
_LEAST_GROWN_BYTES = 4096
"""Bytes that other threads may have allocated meanwhile."""


@dataclass(frozen=True, slots=True)
class NodeMask:
    """The tokens that may follow one node of a tree or the last committed token."""

    words: MaskWords | None
    """[ceil(V / 32)] uint32, one bit per token id, set if allowed; None: all are allowed."""
    must_end: bool = False
    """Only tokens that end the choice are allowed, so `min_tokens` must not hold them back."""
    fault: GrammarError | None = None
    """Why the mask is unknown; no token is allowed then."""


class Following(TypedDict):
    """Arguments of a `GrammarFollower` beside its matcher and its field."""

    vocab_size: int
    eos_token_ids: list[int]
    after_token_id: int | None
    opening_token_id: int | None
    holds_back_eos: bool


class TooSlow(Exception):
    """Following tokens took more than its time; the follower is unusable."""


class _Phase(enum.Enum):
    START = enum.auto()
    """The grammar decides, but the opening token is allowed, too."""
    BEFORE = enum.auto()
    """All tokens are allowed."""
    INSIDE = enum.auto()
    """The grammar decides."""
    OVER = enum.auto()
    """An end-of-sequence token has come; no token is allowed."""


class GrammarFollower:
    """One session's place in its grammar. Committed tokens move it; masks of trees do not.

    All tokens are allowed before `after_token_id`, none after an end-of-sequence token. With `opening_token_id` this
    holds for outputs that begin with it; others are constrained from their beginning. Not thread-safe. Cost: about 1 us
    per token, 10 to 30 us per mask of a small vocabulary.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        field: str,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        after_token_id: int | None = None,
        opening_token_id: int | None = None,
        holds_back_eos: bool = False,
    ) -> None:
        """Start before the first output token.

        Args:
            matcher: at its start; owned by the follower from now on.
            field: the constraint's path, for errors.
            vocab_size: ids at and past it are never allowed.
            eos_token_ids: tokens that may follow a complete output.
            after_token_id: token after which the grammar begins; None: it begins at once.
            opening_token_id: first token of outputs that have text before the grammar; None: all have.
            holds_back_eos: forbid `eos_token_ids` while other tokens are allowed (`ignore_eos`).
        """
        self._eos_token_ids = frozenset(eos_token_ids)
        self._start = matcher.deep_copy()
        self._matcher = matcher
        self._field = field
        self._vocab_size = vocab_size
        self._after = after_token_id
        self._holds_back_eos = holds_back_eos
        self._opening = opening_token_id if after_token_id is not None else None
        is_before = after_token_id is not None
        self._phase = _Phase.START if self._opening is not None else _Phase.BEFORE if is_before else _Phase.INSIDE
        self._committed: list[int] = []
        """Committed tokens that the matcher has consumed."""
        self._trail: list[tuple[_Phase, int]] = []
        """For each uncommitted token, the phase before it and the token."""
        self._spent_s = 0.0
        self._limit = ""
        """What a token was refused for, if it was a limit of the matcher."""
        self.on_grown: Callable[[int], str] | None = None
        """Counts bytes by which the shared automaton has grown; returns why it must not be used on, empty: it may."""
        self._outgrown: GrammarError | None = None

    def take_spent_s(self) -> float:
        """Seconds of processor time that calls have taken since the last call of this method."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def commit(self, token_ids: Sequence[int], most_s: float | None = None) -> None:
        """Move past tokens.

        Raises:
            GrammarError: a token is forbidden, or beyond a limit of the matcher; the follower is unusable then.
            TooSlow: it took more than `most_s` seconds of processor time.
        """
        began_s = time.thread_time()
        for token in token_ids:
            self._limit = ""
            if not self._push(token):
                limit = f"cannot be followed: {self._limit}" if self._limit else ""
                raise GrammarError(self._field, limit or f"the constraint does not allow token {token}")
            if most_s is not None and time.thread_time() - began_s > most_s:
                raise TooSlow
        self._committed += self._given()
        self._trail.clear()
        self._spent_s += time.thread_time() - began_s

    def legal_nodes(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """[N] Whether each node's whole path is allowed. Parents come before their children."""
        legal = [False] * len(token_ids)

        def look(node: int) -> bool:
            legal[node] = True
            return True

        began_s = time.thread_time()
        self._visit(token_ids, parents, look)
        self._spent_s += time.thread_time() - began_s
        return legal

    def masks(
        self, token_ids: Sequence[int], parents: Sequence[int], held_back: Sequence[Collection[int]] = ()
    ) -> list[NodeMask]:
        """What may follow the last committed token, then what may follow each node.

        The mask of a forbidden node has no bit set.

        Args:
            token_ids: [N] tokens of the nodes, parents before children.
            parents: [N] index of each node's parent, -1 for the last committed token.
            held_back: [1 + N] tokens that `min_tokens` forbids at each place; empty: none.
        """
        nothing = NodeMask(self._no_words())
        found = [nothing] * (1 + len(token_ids))
        is_weighed = self.on_grown is not None and random.random() * _WEIGHED_CALLS < 1
        before = allocated_bytes() if is_weighed else 0

        def look(node: int) -> bool:
            found[1 + node] = self._mask(held_back[1 + node] if held_back else ())
            return found[1 + node].fault is None

        began_s = time.thread_time()
        if look(-1):
            self._visit(token_ids, parents, look)
        self._spent_s += time.thread_time() - began_s
        if is_weighed:
            self._grew(allocated_bytes() - before)
        return found

    def mask_after(self, token_ids: Sequence[int], held_back: Collection[int] = ()) -> NodeMask:
        """The mask after these tokens; no bit is set if they are forbidden."""
        began_s = time.thread_time()
        mask = self._mask(held_back) if self._push_all(token_ids) else NodeMask(self._no_words())
        self._pop_all()
        self._spent_s += time.thread_time() - began_s
        return mask

    def forced(self, token_ids: Sequence[int] = (), limit: int = 64) -> list[int]:
        """Tokens that must follow these, each the only one allowed; at most `limit`."""
        found: list[int] = []
        began_s = time.thread_time()
        if self._push_all(token_ids) and self._phase is _Phase.INSIDE:
            if not self._matcher.is_stopped():
                found = list(self._matcher.compute_ff_tokens())
            elif not self._matcher.is_error() and len(self._eos_token_ids) == 1:
                found = list(self._eos_token_ids)
            if self._matcher.is_error():
                self._rebuild()
                found = []
        self._pop_all()
        self._spent_s += time.thread_time() - began_s
        return found[:limit]

    # --- details

    def _grew(self, num_bytes: int) -> None:
        """A call in `_WEIGHED_CALLS` is weighed, and stands for the others."""
        if self.on_grown is None or num_bytes <= _LEAST_GROWN_BYTES:
            return
        if refusal := self.on_grown(num_bytes * _WEIGHED_CALLS):
            self._outgrown = GrammarError(self._field, refusal, code_pb2.RESOURCE_EXHAUSTED)

    def _visit(self, token_ids: Sequence[int], parents: Sequence[int], look: Callable[[int], bool]) -> None:
        """Call `look` at each allowed node, depth first; skip the children of a node if it returns False."""
        children: list[list[int]] = [[] for _ in range(1 + len(token_ids))]
        for node in reversed(range(len(token_ids))):
            children[1 + parents[node]].append(node)
        stack = [(node, 0) for node in children[0]]
        while stack:
            node, depth = stack.pop()
            while len(self._trail) > depth:
                self._pop()
            if self._push(token_ids[node]) and look(node):
                stack += [(child, depth + 1) for child in children[1 + node]]
        self._pop_all()

    def _push_all(self, token_ids: Sequence[int]) -> bool:
        return all(self._push(token) for token in token_ids)

    def _pop_all(self) -> None:
        while self._trail:
            self._pop()

    def _push(self, token: int) -> bool:
        """Take a token. Returns False and changes nothing if it is forbidden."""
        phase = self._phase
        if phase is _Phase.BEFORE:
            if token == self._after:
                self._phase = _Phase.INSIDE
        elif phase is _Phase.START and token == self._opening:
            self._phase = _Phase.BEFORE
        elif phase is _Phase.OVER:
            return False
        elif token in self._eos_token_ids:
            if not (self._matcher.is_accepting() or self._matcher.is_stopped()):
                return False
            self._phase = _Phase.OVER
        elif self._matcher.try_consume_tokens([token]) != 1:
            if self._matcher.is_error():
                self._limit = shown(self._matcher.get_error())
                self._rebuild()
            return False
        else:
            self._phase = _Phase.INSIDE
        self._trail.append((phase, token))
        return True

    def _pop(self) -> None:
        phase, _ = self._trail.pop()
        if phase in (_Phase.START, _Phase.INSIDE) and self._phase is _Phase.INSIDE:
            self._matcher.rollback(1)
        self._phase = phase

    def _given(self) -> list[int]:
        """Tokens of the trail that the matcher has consumed."""
        is_over = self._phase is _Phase.OVER
        tokens = self._trail[:-1] if is_over and self._trail else self._trail
        return [
            token
            for phase, token in tokens
            if phase is _Phase.INSIDE or (phase is _Phase.START and token != self._opening)
        ]

    def _rebuild(self) -> None:
        """Replace the matcher, which is unusable after it has hit a limit."""
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens([*self._committed, *self._given()])

    def _no_words(self) -> MaskWords:
        return np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)

    def _all_words(self) -> MaskWords:
        words = np.full(-(-self._vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)
        if self._vocab_size % 32:
            words[-1] = (1 << self._vocab_size % 32) - 1
        return words

    def _mask(self, held_back: Collection[int]) -> NodeMask:
        if self._outgrown is not None:
            return NodeMask(self._no_words(), fault=self._outgrown)
        if self._phase is _Phase.BEFORE:
            if not self._holds_back_eos:
                return NodeMask(None)
            words = self._all_words()
        elif self._phase is _Phase.OVER:
            return NodeMask(self._no_words())
        else:
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: -(-self._vocab_size // 32)].copy()
            if self._matcher.is_error():
                fault = GrammarError(self._field, f"cannot be followed: {shown(self._matcher.get_error())}")
                self._rebuild()
                return NodeMask(self._no_words(), fault=fault)
            if self._phase is _Phase.START and self._opening is not None and self._opening < self._vocab_size:
                words[self._opening // 32] |= np.uint32(1 << self._opening % 32)
        if self._holds_back_eos:
            without = _cleared(words, self._eos_token_ids)
            words = without if without.any() else words
        must_end = bool(held_back) and not _cleared(words, held_back).any()
        return NodeMask(words, must_end)


def _cleared(words: MaskWords, token_ids: Collection[int]) -> MaskWords:
    cleared = words.copy()
    for token in token_ids:
        if token // 32 < len(cleared):
            cleared[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    return cleared
