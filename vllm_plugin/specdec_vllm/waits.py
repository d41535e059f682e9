"""Whether rows get proposals, and how long a step waits for drafts: what committed most tokens per second, as learnt by
our target."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from specdec.target_service.policy.hold_off import DEPTHS, HoldOffChoice
from specdec.target_service.policy.means import MOST_SURPRISE, Mean
from specdec_vllm.rows import RowSession

NOTHING = -1
"""A depth: rows get no proposals, as their verification costs more than it gains."""
_LONGEST_STEP_S = 1.0
"""Seconds between two calls above which vLLM was idle: nothing is learnt from them."""


class Waits:
    """Picks the depth of chains that a step waits for, and the longest wait. Times are monotonic seconds."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._choices: defaultdict[int, HoldOffChoice] = defaultdict(lambda: HoldOffChoice(depths=(NOTHING, *DEPTHS)))
        """By the binary logarithm of the number of rows: with more rows a step costs more, and so does a proposal."""
        self._choice = self._choices[0]
        self._means: dict[int, Mean] = {}
        self._since_s: float | None = None
        self._depth = 0

    def begin(self, now_s: float, num_rows: int, num_committed: float, num_speculative_tokens: int) -> int:
        """A step has committed tokens: learn what the last choice was worth.

        Returns the depth to wait for now; 0: what is there is proposed; NOTHING: nothing is.
        """
        if self._since_s is not None and num_rows and now_s - self._since_s < _LONGEST_STEP_S:
            # Per row: batches of similar sizes are compared.
            self._choice.observe(self._depth, round(1000 * num_committed / num_rows), now_s - self._since_s)
        self._since_s = now_s
        self._choice = self._choices[num_rows.bit_length()]
        self._depth = self._choice.choose(num_speculative_tokens)
        return self._depth

    def bound_s(self, depth: int) -> float:
        """Longest wait for a depth: a few times the usual one."""
        mean = self._means.get(depth)
        return self._most_s if mean is None else min(self._most_s, MOST_SURPRISE * mean.value)

    def waited(self, depth: int, elapsed_s: float, *, is_in_time: bool) -> None:
        """Learn how long a wait took. One without an answer counts twice, so that the bound can grow again."""
        self._means.setdefault(depth, Mean()).observe(elapsed_s if is_in_time else 2 * elapsed_s + 1e-4)

    def wait(self, lock: threading.Condition, depth: int, rows: Sequence[tuple[RowSession, int]]) -> float:
        """Wait until each row has a chain of `depth`, or its draft has no more, or the time is over.

        Returns the seconds it took. `lock`: held, and given up meanwhile. `rows`: each with the most tokens it takes.
        """
        missing = [(session, min(depth, most)) for session, most in rows if _lacks(session, min(depth, most))]
        if not missing:
            return 0.0

        def is_done() -> bool:
            while missing and not _lacks(*missing[-1]):
                missing.pop()
            return not missing

        began_s = time.monotonic()
        is_in_time = lock.wait_for(is_done, self.bound_s(depth))
        elapsed_s = time.monotonic() - began_s
        self.waited(depth, elapsed_s, is_in_time=is_in_time)
        return elapsed_s


def _lacks(session: RowSession, depth: int) -> bool:
    """Whether a row's draft is worth waiting for: it has answered before, and has less than `depth` tokens."""
    offer = session.offer
    if session.home is None or offer is None or (offer.is_complete and offer.start == session.num_tokens):
        return False
    return len(session.chain(depth)) < depth
