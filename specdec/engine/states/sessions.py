"""Which states and kept inputs of recurrent layers each sequence holds.

A sequence has one committed state per recurrent layer, in one slot for all layers. For later tokens and for the nodes
of a step only the layers' inputs are kept, in rows: a step starts at the committed state, repeats the kept inputs that
the sequence's tokens name, and computes its own rows from there. So a rollback changes nothing here: the next step
finds the rows by the tokens that are left.

A state that is hashed (a snapshot at a block's end) is never written again; the next state goes to another slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Protocol

from specdec.engine.block_pool import BlockPool
from specdec.engine.sequence import Sequence
from specdec.engine.tree import ROOT


@dataclass(slots=True, kw_only=True)
class ItemStates:
    """States of one sequence in a step, whose rows are new tokens, then nodes."""

    read_slot: int
    """Slot of the committed state; -1: the state before any token."""
    write_slot: int
    """Slot of the next committed state; -1: it stays."""
    save_after: int
    """Tokens from the committed state to the next one."""
    repeated: list[int]
    """Rows of kept inputs between the committed state and the first new token."""
    kept: list[int]
    """Row that keeps the inputs of each of the step's rows; -1: not kept."""
    num_new_tokens: int
    parents: Ids[int]
    """Parents of the nodes; ROOT: the last token."""


@dataclass(slots=True, eq=False)
class HeldState:
    """What a sequence holds."""

    slot: int | None = None
    """Slot of the committed state; None: no token is in it."""
    num_tokens: int = 0
    """Tokens in the committed state."""
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    """Rows of kept inputs by the row of the token before (ROOT: the committed state) and the token's id."""
    path: list[int] = field(default_factory=list)
    """Rows of the computed tokens after the committed state, in order, as `SessionStates.settle` found them."""
    next_slot: int | None = None
    """Reserved for the next committed state; None: the present slot is written."""
    stop: int = 0
    """Number of tokens after which a snapshot is due, as other sequences share them."""
    latest: bytes | None = None
    """Digest of the last snapshot behind the prompt, which the next one replaces."""
    planned: tuple[int, bool, dict[tuple[int, int], int]] | None = None
    """Of the step: tokens in the next state, whether it is a snapshot, and the step's kept rows."""


class SequenceStates(Protocol):
    """States of sequences as the scheduler sees them."""

    def settle(self, seq: Sequence) -> bool:
        """Drop rows that the computed tokens do not name. Returns False if these tokens must be computed again."""

    def usable_prefix(self, seq: Sequence, num_blocks: int) -> int:
        """Take the latest snapshot within the first blocks, whose digests the sequence has. Returns its blocks."""

    def chunk(self, seq: Sequence, num_new: int) -> int:
        """Number of the next `num_new` tokens to compute in this step."""

    def is_short(self, seq: Sequence) -> bool:
        """Whether the sequence needs a slot and none is free."""

    def reserve(self, seq: Sequence) -> None:
        """Reserve the slot of the next state. Raises OutOfBlocks if `is_short`."""

    def plan(
        self, seq: Sequence, start: int, num_new: int, num_nodes: int, *, completes: bool
    ) -> tuple[ItemStates | None, int]:
        """Plan a step's item. Returns its states and how many of its nodes can be kept."""

    def advance(self, seq: Sequence) -> None:
        """Take over what the step has computed, after its final blocks were hashed."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give a fork the parent's states, which are shared until either writes."""

    def forget(self, seq: Sequence) -> None:
        """Remove a sequence's snapshots from the prefix cache."""

    def release(self, seq: Sequence) -> None:
        """Drop all that a sequence holds; snapshots stay in the prefix cache."""


class NoStates:
    """States of a model without recurrent layers. See `SequenceStates`."""

    def settle(self, seq: Sequence) -> bool:
        """Nothing to drop."""
        return True

    def usable_prefix(self, seq: Sequence, num_blocks: int) -> int:
        """All blocks."""
        return num_blocks

    def chunk(self, seq: Sequence, num_new: int) -> int:
        """All tokens."""
        return num_new

    def is_short(self, seq: Sequence) -> bool:
        """Never."""
        return False

    def reserve(self, seq: Sequence) -> None:
        """Nothing to reserve."""

    def plan(
        self, seq: Sequence, start: int, num_new: int, num_nodes: int, *, completes: bool
    ) -> tuple[ItemStates | None, int]:
        """No states; all nodes."""
        return None, num_nodes

    def advance(self, seq: Sequence) -> None:
        """Nothing to take over."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Nothing to share."""

    def forget(self, seq: Sequence) -> None:
        """No snapshots."""

    def release(self, seq: Sequence) -> None:
        """Nothing to drop."""


class SessionStates:
    """States of a model with recurrent layers, in a fixed number of slots. See `SequenceStates`.

    Guarantee: a step reads a sequence's own tokens' state and inputs, or the tokens are computed again.
    """

    def __init__(self, num_slots: int, num_rows: int, block_size: int) -> None:
        """Slots hold states and snapshots, rows hold kept inputs; snapshots are taken at ends of KV blocks."""
        self._slots = BlockPool(num_slots, block_size)
        self._rows = BlockPool(num_rows, 1)
        self._block_size = block_size
        self._held: dict[int, HeldState] = {}

    def held(self, seq: Sequence) -> HeldState | None:
        """What a sequence holds; None: nothing."""
        return self._held.get(seq.seq_id)

    def settle(self, seq: Sequence) -> bool:
        """See `SequenceStates`. Cost: linear in the tokens behind the committed state."""
        held = self.held(seq)
        if held is None:
            return seq.num_computed_tokens == 0
        if held.num_tokens > seq.num_computed_tokens:
            return False
        path: list[int] = []
        row = ROOT
        kept: dict[tuple[int, int], int] = {}
        for token in seq.token_ids[held.num_tokens : seq.num_computed_tokens]:
            found = held.rows.get((row, token))
            if found is None:
                return False
            kept[row, token] = found
            path.append(found)
            row = found
        self._rows.free([number for key, number in held.rows.items() if key not in kept])
        held.rows, held.path = kept, path
        return True

    def usable_prefix(self, seq: Sequence, num_blocks: int) -> int:
        """See `SequenceStates`."""
        held = self._held[seq.seq_id] = HeldState()
        held.stop = num_blocks * self._block_size
        for usable in range(num_blocks, 0, -1):
            slot = self._slots.find(seq.block_digests[usable - 1])
            if slot is not None:
                self._slots.share([slot])
                held.slot, held.num_tokens = slot, usable * self._block_size
                return usable
        return 0

    def chunk(self, seq: Sequence, num_new: int) -> int:
        """All tokens, or those up to the end of blocks that other sequences share."""
        held = self.held(seq)
        to_stop = 0 if held is None else held.stop - seq.num_computed_tokens
        return min(num_new, to_stop) if to_stop > 0 else num_new

    def is_short(self, seq: Sequence) -> bool:
        """See `SequenceStates`."""
        return self._needs_slot(seq) and not self._slots.num_free

    def reserve(self, seq: Sequence) -> None:
        """See `SequenceStates`."""
        held = self._held.setdefault(seq.seq_id, HeldState())
        if self._needs_slot(seq):
            [held.next_slot] = self._slots.allocate(1)

    def _needs_slot(self, seq: Sequence) -> bool:
        held = self.held(seq)
        if held is None or held.slot is None:
            return held is None or held.next_slot is None
        return held.next_slot is None and not self._slots.is_writable(held.slot)

    def plan(
        self, seq: Sequence, start: int, num_new: int, num_nodes: int, *, completes: bool
    ) -> tuple[ItemStates | None, int]:
        """See `SequenceStates`. If rows are short, tokens are committed early and nodes are left out."""
        held = self.held(seq)
        if held is None:
            return None, 0
        end = start + num_new
        next_len = max(held.num_tokens, min(seq.num_final_tokens, end))
        whole = next_len // self._block_size * self._block_size
        is_snapshot = whole > held.num_tokens and (completes or next_len == whole == held.stop)
        if is_snapshot:
            next_len = whole
        for shorter in (max(held.num_tokens, min(seq.num_final_tokens, end)), end):
            if end - max(next_len, start) > self._rows.num_free:
                next_len, is_snapshot = shorter, False
        num_kept = end - max(next_len, start)
        tree = seq.tree if num_nodes else None
        num_nodes = min(num_nodes, self._rows.num_free - num_kept)
        kept, rows = self._kept(seq, held, start, num_new, num_kept, num_nodes)
        held.planned = next_len, is_snapshot, rows
        write_slot = held.slot if held.next_slot is None else held.next_slot
        return (
            ItemStates(
                read_slot=-1 if held.slot is None else held.slot,
                write_slot=-1 if next_len == held.num_tokens or write_slot is None else write_slot,
                save_after=next_len - held.num_tokens,
                repeated=held.path,
                kept=kept,
                num_new_tokens=num_new,
                parents=[] if tree is None else tree.parents[:num_nodes],
            ),
            num_nodes,
        )

    def _kept(
        self, seq: Sequence, held: HeldState, start: int, num_new: int, num_kept: int, num_nodes: int
    ) -> tuple[list[int], dict[tuple[int, int], int]]:
        """Allocate rows for the last `num_kept` new tokens and for the nodes; equal nodes share one."""
        rows: dict[tuple[int, int], int] = {}
        kept = [-1] * (num_new - num_kept)
        before = held.path[-1] if held.path and num_kept == num_new else ROOT
        for token in seq.token_ids[start + num_new - num_kept : start + num_new]:
            before = self._row(rows, before, token)
            kept.append(before)
        nodes: list[int] = []
        if seq.tree is not None:
            for token, parent in zip(seq.tree.token_ids[:num_nodes], seq.tree.parents, strict=False):
                nodes.append(self._row(rows, before if parent == ROOT else nodes[parent], token))
        return kept + nodes, rows

    def _row(self, rows: dict[tuple[int, int], int], before: int, token: int) -> int:
        found = rows.get((before, token))
        if found is None:
            [found] = self._rows.allocate(1)
            rows[before, token] = found
        return found

    def advance(self, seq: Sequence) -> None:
        """See `SequenceStates`."""
        held = self.held(seq)
        if held is None or held.planned is None:
            return
        next_len, is_snapshot, rows = held.planned
        held.planned = None
        num_added = next_len - held.num_tokens
        if num_added:
            if held.next_slot is not None:
                if held.slot is not None:
                    self._slots.free([held.slot])
                held.slot, held.next_slot = held.next_slot, None
            held.num_tokens = next_len
        held.rows = self._below(held, rows, num_added)
        if num_added and is_snapshot and held.slot is not None:
            self._take_snapshot(seq, held, held.slot)

    def _below(self, held: HeldState, rows: dict[tuple[int, int], int], num_added: int) -> dict[tuple[int, int], int]:
        """The rows below the new committed state; frees those of the tokens in it."""
        dropped = held.path[:num_added]
        self._rows.free(dropped)
        below = {key: row for key, row in held.rows.items() if row not in dropped} | rows
        if not dropped:
            return below
        return {(ROOT if before == dropped[-1] else before, token): row for (before, token), row in below.items()}

    def _take_snapshot(self, seq: Sequence, held: HeldState, slot: int) -> None:
        digest = seq.block_digests[held.num_tokens // self._block_size - 1]
        if not self._slots.register(slot, digest):
            return
        if held.num_tokens > seq.num_prompt_tokens:
            previous, held.latest = held.latest, digest
            if previous is not None:
                self._forget(previous)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """See `SequenceStates`."""
        held = self.held(parent)
        if held is None:
            return
        if held.slot is not None:
            self._slots.share([held.slot])
        self._rows.share(held.rows.values())
        self._held[child.seq_id] = HeldState(held.slot, held.num_tokens, dict(held.rows), list(held.path))

    def forget(self, seq: Sequence) -> None:
        """See `SequenceStates`."""
        for digest in seq.block_digests:
            self._forget(digest)

    def _forget(self, digest: bytes) -> None:
        slot = self._slots.find(digest)
        if slot is not None:
            self._slots.forget([slot])

    def release(self, seq: Sequence) -> None:
        """See `SequenceStates`."""
        held = self._held.pop(seq.seq_id, None)
        if held is None:
            return
        self._slots.free([slot for slot in (held.slot, held.next_slot) if slot is not None])
        rows = list(held.rows.values())
        if held.planned is not None:
            rows += held.planned[2].values()
        self._rows.free(rows)
