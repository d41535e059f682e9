"""A session's tokens, and the blocks that hold their keys and values."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from specdec.engine.tree import TokenTree


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens of one session inside one engine, and how much of them is in the KV cache.

    Three lengths order every sequence: ``num_final_tokens`` and ``num_computed_tokens``, each at most
    ``len(token_ids)``. Tokens past the final ones are speculation: they may be rolled back, so their blocks are never
    hashed. Tokens past the computed ones are pending: the next steps compute them. Logical slot ``i`` (of block
    ``block_ids[i // block_size]``) holds the keys and values of token ``i``; while a tree is verified, slot
    ``len(token_ids) + i`` holds those of node ``i``.
    """

    seq_id: int
    """Unique within the engine."""
    token_ids: list[int]
    """Prompt, output and speculative chain."""
    num_prompt_tokens: int
    """How many of them are the prompt."""
    num_final_tokens: int = 0
    """Tokens that are never rolled back; only full blocks of these are hashed."""
    num_computed_tokens: int = 0
    """Slots ``[0, n)`` are valid; a slot past it is overwritten before it is read."""
    num_served_tokens: int = 0
    """Tokens up to which steps have given their logits. A sequence that is preempted when all are served does not run
    again, and gives no logits twice, before there are more tokens or a tree."""
    num_cached_tokens: int = 0
    """Tokens that the prefix cache supplied when the sequence was first scheduled."""
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    """Physical blocks in logical order (int32, so that a step copies it in one go)."""
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
    """Logits are wanted for every token from `prompt_logits_from` on, so the prefix cache supplies none of these."""
    prompt_logits_from: int = 0
    """Position of the first token whose logits are wanted; rows of tokens before it may be given all the same."""
    wants_logits: bool = True
    """Logits are wanted for the last token; false only warms the cache."""

    # Bookkeeping of the engine itself; roles leave these alone.
    block_digests: list[bytes] = field(default_factory=list)
    """Hash chain of the first full final blocks, kept for life."""
    num_hashed_blocks: int = 0
    """Leading blocks already offered to the prefix cache."""
    admitted: bool = False
    """It has been scheduled at least once."""
    last_turn: int = 0
    """Grows with every step that it was part of, for turns among too many decodes."""
    verified_tree: TokenTree | None = None
    """The tree of the last step, until accepted or forgotten."""
    num_verified_nodes: int = 0
    """Its leading nodes whose keys and values are in the slots past the tokens."""
    ahead_token_ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the slots past the computed ones, whether they are appended or not
    (`specdec.engine.ahead`)."""

    def forked(self, seq_id: int, num_blocks: int) -> Sequence:
        """A sequence of the same tokens that starts out on this one's first `num_blocks` blocks.

        It has all but what is asked of this one for its next step: pause, tree, verified nodes and prompt logits. The
        caller shares the blocks.
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
        """Whether a step has anything to give to this sequence."""
        return not self.paused and not self.is_idle

    @property
    def is_idle(self) -> bool:
        """Whether all tokens are served and no tree waits: nothing to do before its role says so."""
        return len(self.token_ids) <= self.num_served_tokens and not self.tree

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Preemption order: the highest rank gives up its blocks first."""
        return (self.paused, self.priority, self.arrival)
