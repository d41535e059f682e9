"""Masks of a step's constraints: filled during the forward pass on a free core or beside a GPU, else after it.

A step's rows are known before they are computed, and a constraint's allowed tokens depend on token ids alone.
llguidance fills the masks without the interpreter's lock, which the forward pass does not hold either. While a GPU
computes the pass, the thread that launched it fills the masks.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from specdec.constraints.grammar.follower import NodeMask
from specdec.engine.tree import TokenTree
from specdec.target_service.session import TargetSession

_WORTH_S = 3e-4
"""Expected seconds of filling above which a thread does it: waking a thread takes 20 to 100 us of the step."""
_WEIGHT = 0.1
"""Weight of one measurement in the moving mean of a mask's time."""


@dataclass(slots=True)
class _Share:
    """Masks that a step needs for one session."""

    session: TargetSession
    tree: TokenTree
    num_nodes: int
    masks: list[NodeMask] = field(default_factory=list)
    """[1 + num_nodes] masks; empty before they are filled."""
    error: Exception | None = None
    """Error that filling raised."""

    def is_of(self, session: TargetSession, tree: TokenTree, num_nodes: int) -> bool:
        return self.session is session and self.num_nodes == num_nodes and (self.tree is tree or not num_nodes)

    def fill(self) -> None:
        try:
            self.masks = masks_of(self.session, self.tree, self.num_nodes)
        except Exception as error:
            self.error = error


class MaskFilling:
    """Masks of the present step. Between `begin` and `wait` no other code may use the sessions' grammars.

    Only one thread may call it. An error of filling a session's masks is raised by `take`, and nowhere else.
    """

    def __init__(self, worth_s: float | None) -> None:
        """`worth_s`: expected seconds above which a thread fills the masks; it starts at first use and ends with this
        object. None: no thread is used.
        """
        self._worth_s = math.inf if worth_s is None else worth_s
        self._mask_s = 0.0
        """Moving mean of a mask's time, in seconds."""
        self._jobs: SimpleQueue[Sequence[_Share]] | None = None
        self._done = SimpleQueue[float]()
        self._is_running = False
        self._shares: dict[str, _Share] = {}
        self._unfilled: list[_Share] = []
        self.fill_s = 0.0
        """Seconds of filling the present step's masks, on any thread; known after `wait`."""
        self.wait_s = 0.0
        """Seconds for which the step waited for its masks."""

    def begin(self, wanted: Iterable[tuple[TargetSession, TokenTree, int]]) -> None:
        """Start to fill a step's masks on the thread, if that is worth it; else note them for `fill`.

        Args:
            wanted: for each constrained session whose next token the step decides: session, tree, and number of the
                tree's leading nodes that are verified.
        """
        self.wait()
        self._shares.clear()
        self._unfilled = []
        self.fill_s = self.wait_s = 0.0
        shares = [_Share(*each) for each in wanted]
        if shares and _num_masks(shares) * self._mask_s >= self._worth_s:
            self._shares.update((share.session.session_id, share) for share in shares)
            self._is_running = True
            self._thread_jobs().put(shares)
        else:
            self._unfilled = shares

    def fill(self, is_pass_over: Callable[[], bool]) -> None:
        """Fill the noted masks on the calling thread, while a GPU computes the step."""
        if self._unfilled:
            self._shares.update((share.session.session_id, share) for share in self._unfilled)
            filled_s = _fill(self._unfilled)
            self._learn(filled_s, self._unfilled)
            self._unfilled = []
            if is_pass_over():  # the step waited for them, for an unknown part of the time
                self.wait_s += filled_s / 2

    def wait(self) -> None:
        """Wait until the thread uses no grammar any more. Raises nothing."""
        if self._is_running:
            started_s = time.perf_counter()
            self._learn(self._done.get(), list(self._shares.values()))
            self._is_running = False
            self.wait_s += time.perf_counter() - started_s

    @property
    def hidden_s(self) -> float:
        """Seconds of filling for which the step did not wait."""
        return max(0.0, self.fill_s - self.wait_s)

    def take(self, session: TargetSession, tree: TokenTree, num_nodes: int) -> Sequence[NodeMask]:
        """Masks after the last committed token and after each node, [1 + num_nodes]; filled now if they are not yet.

        Raises:
            Exception: the error that filling raised.
        """
        share = self._shares.get(session.session_id)
        if share is None or not share.is_of(session, tree, num_nodes):
            share = self._shares[session.session_id] = _Share(session, tree, num_nodes)
            elapsed_s = _fill((share,))
            self._learn(elapsed_s, (share,))
            self.wait_s += elapsed_s
        if share.error is not None:
            raise share.error
        return share.masks

    def _learn(self, elapsed_s: float, shares: Sequence[_Share]) -> None:
        self.fill_s += elapsed_s
        self._mask_s += _WEIGHT * (elapsed_s / _num_masks(shares) - self._mask_s)

    def _thread_jobs(self) -> SimpleQueue[Sequence[_Share]]:
        # SimpleQueue is written in C: a thread pool takes 30 us more per step.
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs, self._done), name="masks", daemon=True).start()
            weakref.finalize(self, self._jobs.put, ())
        return self._jobs


def _num_masks(shares: Sequence[_Share]) -> int:
    return sum(1 + share.num_nodes for share in shares)


def _work(jobs: SimpleQueue[Sequence[_Share]], done: SimpleQueue[float]) -> None:
    """Fill jobs until an empty one comes; the thread's body."""
    while shares := jobs.get():
        done.put(_fill(shares))


def _fill(shares: Sequence[_Share]) -> float:
    """Fill masks; returns the seconds it took."""
    started_s = time.perf_counter()
    for share in shares:
        share.fill()
    return time.perf_counter() - started_s


def masks_of(session: TargetSession, tree: TokenTree, num_nodes: int) -> list[NodeMask]:
    """Masks of a session's constraint after its last committed token and after each of the tree's first `num_nodes`
    nodes, [1 + num_nodes]; empty without a constraint."""
    grammar, params = session.grammar, session.params
    if grammar is None:
        return []
    num_output = session.num_tokens - session.body.num_prompt_tokens
    depths = [0, *tree.depths[:num_nodes]]
    held = [params.min_tokens_ids if params.holds_back(num_output + depth) else () for depth in depths]
    return grammar.masks(tree.token_ids[:num_nodes], tree.parents[:num_nodes], held)


def worth_a_thread_s(device: str) -> float | None:
    """Expected seconds of filling above which a thread fills masks; None: no thread is used.

    A GPU's pass is only launched, and the launching thread fills masks meanwhile (`MaskFilling.fill`). On a single core
    a thread would only take turns with the pass.
    """
    return _WORTH_S if device == "cpu" and len(os.sched_getaffinity(0)) > 1 else None
