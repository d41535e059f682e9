"""Suffix decoding (arXiv:2411.04975): proposes what most often followed the longest context seen before.

It searches the session's own text and earlier outputs of its tenant, and counts over the newest occurrences. Of several
context lengths it uses the one with the most expected accepted tokens; ties go to the session's own text. Offers are
trees, best nodes first.

Outputs are kept per tenant salt, so that no tenant's speed depends on another's text. They take at most `max_bytes` in
all; the least recently used tenant loses its oldest text first. A step costs 10 to 80 us.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from specdec.config.drafter_options import SuffixOptions
from specdec.drafting.corpus import SEPARATOR, Corpus
from specdec.drafting.interface import Capabilities, Context, Offer, Room

CAPABILITIES = Capabilities(places=frozenset({"target", "draft_service"}))
_KEY_LENGTH = 2
_MOST_MATCHES = 48
_MOST_LENGTHS = 3
_MOST_OUTPUT_TOKENS = 8192
"""Last tokens kept of an output; indexing them delays other sessions by 3 ms."""
_TOKEN_BYTES = 160
"""Bytes that a kept token takes at most, measured by tests/unit/drafting/test_suffix.py."""
_DOUBT = 0.6
"""Doubt about a match of one token, as in `ngram`, even if all continuations agree."""


class SharedOutputs:
    """Outputs of all tenants, kept apart."""

    def __init__(self, most_requests: int, max_bytes: int) -> None:
        self._most_requests = most_requests
        self._most_tokens = max_bytes // _TOKEN_BYTES
        self._corpora: OrderedDict[bytes, Corpus] = OrderedDict()
        self._sizes: dict[bytes, deque[int]] = {}
        self.num_requests = 0
        self.num_tokens = 0

    def of(self, salt: bytes) -> Corpus | None:
        """A tenant's outputs."""
        return self._corpora.get(salt)

    def add(self, salt: bytes, token_ids: Sequence[int]) -> None:
        """Keep an output and drop old ones beyond the limits."""
        token_ids = token_ids[-min(_MOST_OUTPUT_TOKENS, max(0, self._most_tokens - 1)) :]
        if len(token_ids) <= _KEY_LENGTH or self._most_requests == 0:
            return
        corpus = self._corpora.setdefault(salt, Corpus(_KEY_LENGTH))
        self._corpora.move_to_end(salt)
        corpus.append(token_ids)
        corpus.append((SEPARATOR,))
        self._sizes.setdefault(salt, deque()).append(len(token_ids) + 1)
        self.num_requests += 1
        self.num_tokens += len(token_ids) + 1
        while self.num_requests > self._most_requests or self.num_tokens > self._most_tokens:
            self._forget()

    def _forget(self) -> None:
        salt, corpus = next(iter(self._corpora.items()))
        size = self._sizes[salt].popleft()
        corpus.drop(size)
        self.num_requests -= 1
        self.num_tokens -= size
        if not self._sizes[salt]:
            del self._sizes[salt], self._corpora[salt]


class Suffix:
    """The drafter `suffix`. Sessions share their tenant's outputs."""

    name = "suffix"
    capabilities = CAPABILITIES

    def __init__(self, options: SuffixOptions) -> None:
        self._options = options
        self.outputs = SharedOutputs(options.suffix_decoding_max_cached_requests, options.max_bytes)

    def open(self, context: Context) -> Suffix:
        """Begin a session."""
        return self

    def close(self, context: Context) -> None:
        """Keep the session's output for others of its tenant."""
        start = max(context.num_prompt_tokens, len(context.token_ids) - _MOST_OUTPUT_TOKENS)
        self.outputs.add(context.salt, context.token_ids[start:])

    def propose(self, context: Context, room: Room) -> Offer | None:
        """The tree with the most expected accepted tokens. Cost: occurrences times nodes, both bounded."""
        own = context.index(_KEY_LENGTH)
        best: tuple[float, Offer] | None = None
        for corpus in (own, self.outputs.of(context.salt)):
            if corpus is None or (corpus is own and len(own) < len(context.token_ids)):
                continue
            longest = self._options.suffix_decoding_max_tree_depth
            found = corpus.matches(context.token_ids, longest, _MOST_MATCHES)
            for length in _lengths(found):
                starts = [start for start, agreed in found if agreed >= length]
                expected, offer = self._tree(corpus, starts, length, room)
                if best is None or expected > best[0]:
                    best = expected, offer
        return None if best is None or not best[1].token_ids else best[1]

    def _tree(self, corpus: Corpus, starts: list[int], length: int, room: Room) -> tuple[float, Offer]:
        """The likeliest nodes after these positions; returns the expected accepted tokens, and the tree."""
        options = self._options
        budget = min(room.num_nodes, max(1, int(options.suffix_decoding_max_spec_factor * length)))
        offer = Offer([], [], [])
        expected = 0.0
        # (minus path probability, order, parent, token, score, depth, positions after it)
        waiting: list[tuple[float, int, int, int, float, int, list[int]]] = []
        num_seen = 0

        def see(parent: int, path: float, depth: int, positions: list[int]) -> None:
            nonlocal num_seen
            after: dict[int, list[int]] = {}
            for position in positions:
                token = corpus.token(position)
                if token != SEPARATOR:
                    after.setdefault(token, []).append(position + 1)
            total = sum(map(len, after.values())) + _DOUBT ** (length + depth - 1)
            for token, behind in after.items():
                score = len(behind) / total
                if path * score >= options.suffix_decoding_min_token_prob:
                    num_seen += 1
                    heapq.heappush(waiting, (-path * score, num_seen, parent, token, score, depth, behind))

        see(-1, 1.0, 1, starts)
        while waiting and len(offer.token_ids) < budget:
            negated, _, parent, token, score, depth, behind = heapq.heappop(waiting)
            node = len(offer.token_ids)
            offer.token_ids.append(token)
            offer.parents.append(parent)
            offer.scores.append(score)
            expected -= negated
            if depth < room.depth:
                see(node, -negated, depth + 1, behind)
        return expected, offer


def _lengths(found: Sequence[tuple[int, int]]) -> list[int]:
    """Context lengths to try: the longest, and shorter ones with at least four times the occurrences."""
    counts = Counter(length for _, length in found)
    lengths: list[int] = []
    total = needed = 0
    for length in sorted(counts, reverse=True):
        total += counts[length]
        if total >= needed:
            lengths.append(length)
            needed = 4 * total
        if len(lengths) == _MOST_LENGTHS:
            break
    return lengths
