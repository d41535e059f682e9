"""What a constraint allows after a session's committed tokens, and after each node of a tree below them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from specdec.constraints.grammar.failure import GrammarError
from specdec.constraints.grammar.source import shown

MaskWords = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class NodeMask:
    """What may follow one node of a tree, or the last committed token."""

    words: MaskWords | None
    """[ceil(V / 32)] uint32, a bit per token id, set where it is allowed; None: anything is."""
    must_end: bool = False
    """Nothing is allowed but what ends the choice: `min_tokens` does not hold that back then."""
    fault: GrammarError | None = None
    """Why it is not known what may follow; nothing is allowed then."""


class _Phase(enum.Enum):
    BEFORE = enum.auto()
    """Anything goes."""
    INSIDE = enum.auto()
    """The grammar decides."""
    OVER = enum.auto()
    """An end-of-sequence token has come: nothing goes."""


class GrammarFollower:
    """One session's place in its grammar. Committed tokens move it; looking at trees leaves it where it is.

    Before `after_token_id` has come everything is allowed, and behind an end-of-sequence token nothing.
    Cost: about 1 us for a token, 10 to 30 us for a mask of a small vocabulary. For one thread.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        field: str,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        after_token_id: int | None = None,
        holds_back_eos: bool = False,
    ) -> None:
        """Stand before the first token of the output.

        Args:
            matcher: at its start; taken over.
            field: of the constraint, for errors.
            vocab_size: ids at and past it are never allowed.
            eos_token_ids: what may follow a complete output.
            after_token_id: where the grammar begins, if not at once.
            holds_back_eos: none of these while something else is allowed (`ignore_eos`).
        """
        self._eos_token_ids = frozenset(eos_token_ids)
        self._start = matcher.deep_copy()
        self._matcher = matcher
        self._field = field
        self._vocab_size = vocab_size
        self._after = after_token_id
        self._holds_back_eos = holds_back_eos
        self._phase = _Phase.BEFORE if after_token_id is not None else _Phase.INSIDE
        self._committed: list[int] = []
        """What the matcher was given of the committed tokens."""
        self._trail: list[tuple[_Phase, int]] = []
        """Of each token below the committed ones: the phase before it, and the token."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Move on. Raises GrammarError when the constraint does not allow them; it is of no use then."""
        for token in token_ids:
            if not self._push(token):
                raise GrammarError(self._field, f"token {token} is not what the constraint allows")
        self._committed += self._given()
        self._trail.clear()

    def legal_nodes(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """For each node of a tree, parents before children, whether its whole path is allowed."""
        legal = [False] * len(token_ids)

        def look(node: int) -> bool:
            legal[node] = True
            return True

        self._visit(token_ids, parents, look)
        return legal

    def masks(
        self, token_ids: Sequence[int], parents: Sequence[int], held_back: Sequence[Collection[int]] = ()
    ) -> list[NodeMask]:
        """What may follow the last committed token, then what may follow each node.

        A node that is not allowed has a mask without any bit.

        Args:
            token_ids: [N] of the nodes, parents before children.
            parents: [N], -1 for the last committed token.
            held_back: [1 + N] what `min_tokens` holds back behind each; empty: nothing.
        """
        nothing = NodeMask(self._no_words())
        found = [nothing] * (1 + len(token_ids))

        def look(node: int) -> bool:
            found[1 + node] = self._mask(held_back[1 + node] if held_back else ())
            return found[1 + node].fault is None

        if look(-1):
            self._visit(token_ids, parents, look)
        return found

    def mask_after(self, token_ids: Sequence[int], held_back: Collection[int] = ()) -> NodeMask:
        """What may follow these tokens. Without any bit where they are not allowed."""
        mask = self._mask(held_back) if self._push_all(token_ids) else NodeMask(self._no_words())
        self._pop_all()
        return mask

    def forced(self, token_ids: Sequence[int] = (), limit: int = 64) -> list[int]:
        """Tokens that must follow these, each being the only one that is allowed; at most `limit`."""
        found: list[int] = []
        if self._push_all(token_ids) and self._phase is _Phase.INSIDE:
            if not self._matcher.is_stopped():
                found = list(self._matcher.compute_ff_tokens())
            elif not self._matcher.is_error() and len(self._eos_token_ids) == 1:
                found = list(self._eos_token_ids)
            if self._matcher.is_error():
                self._rebuild()
                found = []
        self._pop_all()
        return found[:limit]

    # --- details

    def _visit(self, token_ids: Sequence[int], parents: Sequence[int], look: Callable[[int], bool]) -> None:
        """Stand at each node that is allowed, depth first; below those where `look` is false nobody stands."""
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
        """Take a token; false, and no change, where it is not allowed."""
        phase = self._phase
        if phase is _Phase.BEFORE:
            if token == self._after:
                self._phase = _Phase.INSIDE
        elif phase is _Phase.OVER:
            return False
        elif token in self._eos_token_ids:
            if not (self._matcher.is_accepting() or self._matcher.is_stopped()):
                return False
            self._phase = _Phase.OVER
        elif self._matcher.try_consume_tokens([token]) != 1:
            if self._matcher.is_error():
                self._rebuild()
            return False
        self._trail.append((phase, token))
        return True

    def _pop(self) -> None:
        phase, _ = self._trail.pop()
        if phase is _Phase.INSIDE and self._phase is _Phase.INSIDE:
            self._matcher.rollback(1)
        self._phase = phase

    def _given(self) -> list[int]:
        """Tokens of the trail that the matcher was given."""
        is_over = self._phase is _Phase.OVER
        tokens = self._trail[:-1] if is_over and self._trail else self._trail
        return [token for phase, token in tokens if phase is _Phase.INSIDE]

    def _rebuild(self) -> None:
        """A matcher that has met a limit is of no use any more."""
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
