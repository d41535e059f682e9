"""A sequence's tokens, and the blocks of their keys and values."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from specdec.engine.tree import TokenTree


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens of a sequence in an engine, and their place in the KV cache.

    ``num_final_tokens`` and ``num_computed_tokens`` are each at most ``len(token_ids)``. Tokens past the final ones are
    speculative: they may be rolled back, so their blocks are never hashed. Tokens past the computed ones are pending:
    the next steps compute them. Logical slot ``i`` (of block ``block_ids[i // block_size]``) holds the keys and values
    of token ``i``; while a tree is verified, slot ``len(token_ids) + i`` holds those of node ``i``.
    """

    seq_id: int
    """Unique within the engine."""
    token_ids: list[int]
    """Prompt, output and speculative chain."""
    num_prompt_tokens: int
    """Number of prompt tokens."""
    num_final_tokens: int = 0
    """Number of leading tokens that are never rolled back; only their full blocks are hashed."""
    num_computed_tokens: int = 0
    """Number of valid slots; later ones are overwritten before they are read."""
    num_served_tokens: int = 0
    """Number of tokens for which steps have returned logits. If all are served, a preempted sequence runs again only
    with more tokens or a tree, so that no logits are returned twice.
    """
    num_cached_tokens: int = 0
    """Number of tokens from the prefix cache when the sequence was first scheduled."""
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    """Physical blocks in logical order (int32, for fast copies to a step's tensors)."""
    priority: int = 0
    """Lower runs first and is preempted last."""
    arrival: int = 0
    """Orders sequences of one priority; earlier runs first."""
    cache_salt: bytes = b""
    """Prefix-cache blocks are shared only between equal salts (one per tenant)."""
    paused: bool = False
    """Not scheduled, and the first to be preempted."""
    tree: TokenTree | None = None
    """Nodes to verify in the step that computes the last pending token; cleared by that step."""
    prompt_logits: bool = False
    """Whether every token from `prompt_logits_from` on needs logits, so that it is not taken from the prefix cache."""
    prompt_logits_from: int = 0
    """Position of the first token with logits; earlier rows may be returned, too."""
    wants_logits: bool = True
    """Whether the last token needs logits; False only fills the cache."""

    # Bookkeeping of the engine itself; roles leave these alone.
    block_digests: list[bytes] = field(default_factory=list)
    """Hash chain of the first full final blocks, kept for life."""
    num_hashed_blocks: int = 0
    """Leading blocks already offered to the prefix cache."""
    admitted: bool = False
    """Whether it has been scheduled."""
    last_turn: int = 0
    """Number of its last turn, for turns among too many decodes."""
    verified_tree: TokenTree | None = None
    """The tree of the last step, until accepted or forgotten."""
    num_verified_nodes: int = 0
    """Number of its leading nodes whose keys and values are behind the tokens."""
    ahead_token_ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are behind the computed slots, appended or not (`specdec.engine.ahead`)."""

    def forked(self, seq_id: int, num_blocks: int) -> Sequence:
        """A sequence with the same tokens and this one's first `num_blocks` blocks.

        Pause, tree, verified nodes and prompt logits are not copied. The caller shares the blocks.
        """
        return replace(
            self,
            seq_id=seq_id,
            arrival=seq_id,
            token_ids=list(self.token_ids),
            block_ids=self.block_ids[:num_blocks],
            block_digests=list(self.block_digests),
            paused=False,
            tree=None,
            prompt_logits=False,
            last_turn=0,
            verified_tree=None,
            num_verified_nodes=0,
            ahead_token_ids=[],
        )

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_ready(self) -> bool:
        """Whether a step can compute something for this sequence."""
        return not self.paused and (len(self.token_ids) > self.num_served_tokens or bool(self.tree))

    @property
    def is_idle(self) -> bool:
        """Whether all tokens are served and no tree waits."""
        return len(self.token_ids) <= self.num_served_tokens and not self.tree

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Preemption order: the highest rank is preempted first."""
        return (self.paused, self.priority, self.arrival)
