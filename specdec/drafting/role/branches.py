"""The engine's sequences that grow the trees: extended by guesses, forked for runners-up, kept or freed at a commit."""

from __future__ import annotations

import math

from specdec.drafting.role.corrections import likeliest_correction
from specdec.drafting.role.growth import GrowthPolicy
from specdec.drafting.role.session import DraftSession, GrowingLeaf, Guess
from specdec.engine.engine import Engine
from specdec.engine.errors import EngineError
from specdec.engine.sequence import Sequence
from specdec.engine.tree import ROOT
from specdec.wire.sampling_params import VerifyMode


class Branches:
    """The heads of all sessions, each with a sequence of the engine.

    A branch shares blocks with the head from which it was forked; it copies the last one at its first write.
    """

    def __init__(self, engine: Engine, max_model_len: int, num_ranks: int) -> None:
        """`num_ranks`: likely corrections of a drawn token, in rejection mode."""
        self._num_ranks = num_ranks
        self._engine = engine
        self._max_model_len = max_model_len
        self._owners: dict[int, tuple[DraftSession, GrowingLeaf]] = {}

    def owner(self, seq: Sequence) -> tuple[DraftSession, GrowingLeaf]:
        """The session and head of a sequence."""
        return self._owners[seq.seq_id]

    def any_ready(self) -> bool:
        """Whether a step has anything to compute."""
        return any(head.seq.is_ready for _, head in self._owners.values())

    def ready_heads(self) -> list[GrowingLeaf]:
        """Heads for which a step has something to compute."""
        return [head for _, head in self._owners.values() if head.seq.is_ready]

    def ready_places(self) -> list[tuple[DraftSession, GrowingLeaf]]:
        """Heads for which a step has something to compute, with their sessions."""
        return [owner for owner in self._owners.values() if owner[1].seq.is_ready]

    def ready(self) -> list[DraftSession]:
        """The sessions for which a step has something to compute."""
        return list({id(owner): owner for owner, head in self._owners.values() if head.seq.is_ready}.values())

    def plant(self, session: DraftSession, seq: Sequence) -> None:
        """Give a new session its main head."""
        self._add(session, GrowingLeaf(seq, chain_start=session.num_committed))

    def free(self, session: DraftSession) -> None:
        """Free all heads."""
        for head in session.heads:
            self._drop(head)
        session.heads.clear()

    def extend(
        self, session: DraftSession, head: GrowingLeaf, guess: Guess, draft_us: int, growth: GrowthPolicy
    ) -> None:
        """Add a guess below a head, with its runners-up and the tokens that a constraint forces after it."""
        num_tokens = len(head.seq.token_ids)
        parent = head.node
        is_end = session.ends_choice(guess.token_id, num_tokens + 1)
        head.node = session.add(parent, guess.token_id, guess.score, is_end, draft_us, guess.sample)
        for token_id, score in guess.siblings:
            if len(session.tree) < growth.node_limit:
                ends = session.ends_choice(token_id, num_tokens + 1)
                session.add(parent, token_id, score, ends, draft_us, None)
        try:
            self._engine.append(head.seq, [guess.token_id])
        except EngineError:  # the draft's context ends: the guess stays, without children
            head.node, head.is_over = parent, True
            return
        head.is_over = is_end
        if not is_end:
            extend_forced(self._engine, growth, session, head)

    def choose(self, session: DraftSession, growth: GrowthPolicy, num_branches: int) -> None:
        """Decide which heads continue, and start up to `num_branches` beside the main one."""
        if session.is_suspended or session.is_compiling:
            session.num_unsent, session.committed_at_s = 0, None
            for head in session.heads:
                head.seq.paused = True
            return
        if session.max_chain != 0 and session.may_step and (num_branches or len(session.heads) > 1):
            if session.mode is VerifyMode.COUPLED:
                self._start(session, growth, num_branches - self._retire(session, growth))
            else:
                self._start_corrections(session, growth, num_branches)
        for head in session.heads:
            head.seq.paused = not session.may_step or not _wants_more(session, head, growth)

    def _start_corrections(self, session: DraftSession, growth: GrowthPolicy, num_branches: int) -> None:
        """Fork heads at the likeliest corrections; a head is freed once a new correction is likelier than its leaf."""
        length_left = self._max_model_len - session.num_committed
        output_left = session.body.num_prompt_tokens + session.params.max_tokens - session.num_committed
        max_depth = min(growth.max_depth(session.target_credit), length_left, output_left) - 1
        while True:
            has_room = len(session.tree) + session.max_depth(growth) < growth.node_limit
            correction = likeliest_correction(session, self._num_ranks, max_depth) if has_room else None
            least = growth.min_branch_score if correction is None else correction.score
            self._retire(session, growth, least if has_room else math.inf)
            if correction is None or least < growth.min_branch_score or len(session.heads) > num_branches:
                return
            score = correction.score / session.path_score(correction.parent)
            self._fork(session, session.add(correction.parent, correction.token_id, score, False, 0, None))

    def _retire(self, session: DraftSession, growth: GrowthPolicy, least_score: float = 0.0) -> int:
        """Free branches that will not grow again or have lower scores; their guesses stay. Returns how many stay."""
        for head in session.heads[1:]:
            depth, score = session.tree.depth(head.node), session.path_score(head.node)
            if (
                head.is_over
                or score < least_score
                or not growth.grows(depth, score, len(session.tree), session.target_credit)
            ):
                session.heads.remove(head)
                self._drop(head)
        return len(session.heads) - 1

    def _start(self, session: DraftSession, growth: GrowthPolicy, num_free: int) -> None:
        """Fork heads for the likeliest leaves without a head."""
        if num_free <= 0 or not len(session.tree) or len(session.tree) >= growth.node_limit:
            return
        taken = set(session.tree.parents) | {head.node for head in session.heads}
        max_depth = min(growth.max_depth(session.target_credit), self._max_model_len - 1 - session.num_committed)
        scores = [note.path_score for note in session.notes]
        is_closed = [
            note.is_end or depth >= max_depth for note, depth in zip(session.notes, session.tree.depths, strict=True)
        ]
        for leaf in growth.pick_branches(scores, taken, is_closed, num_free):
            self._fork(session, leaf)

    def follow(self, session: DraftSession, new: list[int]) -> int:
        """Commit tokens. The head that shares most of them becomes the main one, and is corrected to hold them all.

        Returns:
            Number of leading tokens that the tree held.

        Raises:
            SequenceTooLong: the draft's context cannot hold them.
        """
        committed = session.num_committed
        node, num_found = ROOT, 0
        for token in new:
            child = session.tree.child(node, token)
            if child is None:
                break
            node, num_found = child, num_found + 1
        best = max(session.heads, key=lambda head: self._num_shared(head, committed, new))
        num_shared = self._num_shared(best, committed, new)
        if num_shared < len(new):
            self._engine.rollback(best.seq, committed + num_shared)
            self._engine.append(best.seq, new[num_shared:])
        survivors = [h for h in session.heads if h is best or self._num_shared(h, committed, new) == len(new)]
        for head in session.heads:
            if head not in survivors:
                self._drop(head)
        survivors.sort(key=lambda head: (head is not best, head is not session.heads[0]))
        session.heads = survivors
        moved = session.reroot(node) if num_found == len(new) else {}
        if num_found < len(new):
            session.clear()
        for head in survivors:
            if num_shared < len(new):
                head.node, head.is_over, head.chain_start = ROOT, False, committed + len(new)
            else:
                head.node = moved.get(head.node, ROOT)
        session.num_committed = committed + len(new)
        if session.mode is VerifyMode.REJECTION:
            self._follow_chain(session, best)
        session.num_verifying = sum(node < session.num_sent for node in session.main_path)
        return num_found

    def _follow_chain(self, session: DraftSession, head: GrowingLeaf) -> None:
        """Move the main head to the end of the chain below the committed tokens, which a freed head may have drawn."""
        for node, parent in enumerate(session.tree.parents):
            if parent == head.node and session.notes[node].sample is not None:
                self._engine.append(head.seq, [session.tree.token_ids[node]])
                head.node = node

    def _fork(self, session: DraftSession, leaf: int) -> None:
        """Start a head at `leaf`, forked from the head that shares most of its path."""
        committed = session.num_committed
        path = [session.tree.token_ids[node] for node in session.tree.path(leaf)]
        source = max(session.heads, key=lambda head: self._num_shared(head, committed, path))
        num_shared = self._num_shared(source, committed, path)
        seq = self._engine.fork(source.seq)
        self._engine.rollback(seq, committed + num_shared)
        self._engine.append(seq, path[num_shared:])
        self._add(session, GrowingLeaf(seq, leaf, chain_start=committed + len(path)))

    def _add(self, session: DraftSession, head: GrowingLeaf) -> None:
        session.heads.append(head)
        self._owners[head.seq.seq_id] = (session, head)

    def _drop(self, head: GrowingLeaf) -> None:
        del self._owners[head.seq.seq_id]
        self._engine.free(head.seq)

    @staticmethod
    def _num_shared(head: GrowingLeaf, committed: int, path: list[int]) -> int:
        """Number of leading tokens of `path` that the head's sequence holds after the committed ones."""
        drafted = head.seq.token_ids[committed : committed + len(path)]
        return next((i for i, (a, b) in enumerate(zip(drafted, path, strict=False)) if a != b), len(drafted))


def _wants_more(session: DraftSession, head: GrowingLeaf, growth: GrowthPolicy) -> bool:
    # Committed tokens are computed even if nothing is drafted after them.
    if head.seq.num_computed_tokens < session.num_committed:
        return True
    if head.is_over:
        return False
    depth = session.tree.depth(head.node)
    if session.max_chain is not None and head is session.heads[0]:
        return depth < session.max_depth(growth)
    score = session.path_score(head.node)
    return growth.grows(depth, score, len(session.tree), session.target_credit)


def extend_forced(engine: Engine, growth: GrowthPolicy, session: DraftSession, head: GrowingLeaf) -> None:
    """Extend a head by the tokens that its constraint forces, as far as the tree may grow.

    They need no logits and are computed in one chunk. Coupled mode only: the length of a chain for rejection must not
    depend on its tokens.
    """
    if session.grammar is None or session.mode is VerifyMode.REJECTION or session.max_chain is not None:
        return
    room = growth.max_depth(session.target_credit) - session.tree.depth(head.node)
    limit = max(0, min(room, growth.node_limit - len(session.tree)))
    for token in session.grammar.forced(head.seq.token_ids[session.num_committed :], limit):
        is_end = session.ends_choice(token, len(head.seq.token_ids) + 1)
        try:
            engine.append(head.seq, [token])
        except EngineError:  # the draft's context ends here
            head.is_over = True
            return
        head.node = session.add(head.node, token, 1.0, is_end, 0, None)
        if is_end:
            head.is_over = True
            return
