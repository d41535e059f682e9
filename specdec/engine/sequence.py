"""A session's tokens, and the blocks that hold their keys and values."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from specdec.engine.tree import TokenTree


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one session inside one engine, and how much of them is in the KV cache.

    Three lengths order every sequence: ``num_final_tokens`` and ``num_computed_tokens``, each at most
    ``len(token_ids)``. Tokens past the final ones are speculation: they may be rolled back, so their blocks
    are never hashed. Tokens past the computed ones are pending: the next steps compute them. Logical slot
    ``i`` (of block ``block_ids[i // block_size]``) holds the keys and values of token ``i``; while a tree is
    verified, slot ``len(token_ids) + i`` holds those of node ``i``.

    Attributes:
        seq_id: unique within the engine.
        token_ids: prompt, output and speculative chain.
        num_prompt_tokens: how many of them are the prompt.
        num_final_tokens: tokens that are never rolled back; only full blocks of these are hashed.
        num_computed_tokens: slots ``[0, n)`` are valid; a slot past it is overwritten before it is read.
        num_served_tokens: tokens up to which steps have given their logits. One that is preempted when all are
            served does not run again, and gives no logits twice, before there are more tokens or a tree.
        num_cached_tokens: tokens that the prefix cache supplied when the sequence was first scheduled.
        block_ids: physical blocks in logical order (int32, so that a step copies it in one go).
        priority: lower runs first and is preempted last.
        arrival: orders sequences of one priority; earlier runs first.
        cache_salt: prefix-cache blocks are shared only between equal salts (one per tenant).
        paused: not scheduled, and the first to be preempted.
        tree: nodes to verify in the step that computes the last pending token; cleared by that step.
        prompt_logits: logits are wanted for every computed token, so cached prefixes are bypassed.
        wants_logits: logits are wanted for the last token; false only warms the cache.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_final_tokens: int = 0
    num_computed_tokens: int = 0
    num_served_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    priority: int = 0
    arrival: int = 0
    cache_salt: bytes = b""
    paused: bool = False
    tree: TokenTree | None = None
    prompt_logits: bool = False
    wants_logits: bool = True
    # Bookkeeping of the engine itself; roles leave these alone.
    block_digests: list[bytes] = field(default_factory=list)  # hash chain of the first full final blocks, kept for life
    num_hashed_blocks: int = 0  # leading blocks already offered to the prefix cache
    admitted: bool = False  # has been scheduled at least once
    last_turn: int = 0  # grows with every step that it was part of, for turns among too many decodes
    verified_tree: TokenTree | None = None  # the tree of the last step, until accepted or forgotten
    num_verified_nodes: int = 0  # its leading nodes whose keys and values are in the slots past the tokens

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
