"""Masks of a step's constraints: filled beside the forward pass where there is a core for that, else behind it.

Which rows a step computes is known before they are computed, and what a constraint allows there depends on token ids
alone. Filling is llguidance's work, which holds no lock of the interpreter, and neither does the forward pass. While a
device computes the pass, the thread that has launched it fills them.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from specdec.constraints.grammar.follower import NodeMask
from specdec.engine.tree import TokenTree
from specdec.target_service.session import TargetSession

_WORTH_S = 3e-4
"""Seconds of filling above which a thread does it: waking one takes 20 to 100 us of the step."""
_WEIGHT = 0.1
"""Weight of the last measurement in the mean time of a mask."""


@dataclass(slots=True)
class _Share:
    """What a step needs for one session."""

    session: TargetSession
    tree: TokenTree
    num_nodes: int
    masks: list[NodeMask] = field(default_factory=list)
    """[1 + num_nodes], once they are filled."""
    error: Exception | None = None
    """What filling them has raised."""

    def is_of(self, session: TargetSession, tree: TokenTree, num_nodes: int) -> bool:
        return self.session is session and self.num_nodes == num_nodes and (self.tree is tree or not num_nodes)

    def fill(self) -> None:
        try:
            self.masks = masks_of(self.session, self.tree, self.num_nodes)
        except Exception as error:
            self.error = error


class MaskFilling:
    """The masks of the step that runs. Between `begin` and `wait` nobody else may touch the sessions' grammars.

    For one thread. What filling raises for a session is raised where its masks are asked for, and nowhere else.
    """

    def __init__(self, worth_s: float | None) -> None:
        """`worth_s`: masks expected to take longer are filled on a thread, which is started for the first of them and
        ends with this object; None: none are.
        """
        self._worth_s = math.inf if worth_s is None else worth_s
        self._mask_s = 0.0
        """What a mask took of late."""
        self._jobs: SimpleQueue[Sequence[_Share]] | None = None
        self._done = SimpleQueue[float]()
        self._is_running = False
        self._shares: dict[str, _Share] = {}
        self._unfilled: list[_Share] = []
        self.fill_s = 0.0
        """Time that masks of this step took, on whichever thread; known after `wait`."""
        self.wait_s = 0.0
        """Seconds of that for which the step waited."""

    def begin(self, wanted: Iterable[tuple[TargetSession, TokenTree, int]]) -> None:
        """A step is about to run: start on its masks, if that is done beside it.

        Args:
            wanted: of each session with a constraint whose next token it decides, the tree, and how many of its nodes
                are verified.
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

    def fill(self) -> None:
        """Fill now what was begun and no thread fills, as a device computes the step; nobody waits for it."""
        if self._unfilled:
            self._shares.update((share.session.session_id, share) for share in self._unfilled)
            self._learn(_fill(self._unfilled), self._unfilled)
            self._unfilled = []

    def wait(self) -> None:
        """Come back when no grammar is being followed any more; at once where none was. Raises nothing."""
        if self._is_running:
            started_s = time.perf_counter()
            self._learn(self._done.get(), list(self._shares.values()))
            self._is_running = False
            self.wait_s += time.perf_counter() - started_s

    def take(self, session: TargetSession, tree: TokenTree, num_nodes: int) -> Sequence[NodeMask]:
        """Masks behind the last committed token and behind each node; filled now if they were not begun.

        Raises:
            Exception: what filling them has raised.
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
        # Queues of C: a pool of threads takes 30 us more for a step.
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs, self._done), name="masks", daemon=True).start()
            weakref.finalize(self, self._jobs.put, ())
        return self._jobs


def _num_masks(shares: Sequence[_Share]) -> int:
    return sum(1 + share.num_nodes for share in shares)


def _work(jobs: SimpleQueue[Sequence[_Share]], done: SimpleQueue[float]) -> None:
    """Fill what comes until nothing does."""
    while shares := jobs.get():
        done.put(_fill(shares))


def _fill(shares: Sequence[_Share]) -> float:
    """Returns how many seconds it took."""
    started_s = time.perf_counter()
    for share in shares:
        share.fill()
    return time.perf_counter() - started_s


def masks_of(session: TargetSession, tree: TokenTree, num_nodes: int) -> list[NodeMask]:
    """What the session's constraint allows behind its last committed token, and behind each of the leading nodes."""
    grammar, params = session.grammar, session.params
    if grammar is None:
        return []
    num_output = session.num_tokens - session.body.num_prompt_tokens
    depths = [0, *tree.depths[:num_nodes]]
    held = [params.min_tokens_ids if params.holds_back(num_output + depth) else () for depth in depths]
    return grammar.masks(tree.token_ids[:num_nodes], tree.parents[:num_nodes], held)


def worth_a_thread_s(device: str) -> float | None:
    """From which time on masks are filled on a thread; None: the thread would only take turns with the pass.

    A GPU's pass is only launched: the thread that has launched it fills masks while it runs (`MaskFilling.fill`). On a
    single core nothing runs beside it.
    """
    return _WORTH_S if device == "cpu" and len(os.sched_getaffinity(0)) > 1 else None
