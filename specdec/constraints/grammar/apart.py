"""Constraints that cost too much for a step: followed in a process of low priority, for which no step waits.

A session whose constraint is followed apart takes part in a step when its next mask is there, without proposals. Others
do not wait for it. Sessions that have taken little take turns; those that have taken much get what is left, the oldest
all of it: so some of many ends, and the others are told soon that there are too many.
"""

from __future__ import annotations

import heapq
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import structlog

from specdec.constraints.grammar.follower import Following, NodeMask
from specdec.constraints.grammar.line_process import ChildLost, LineProcess, TookTooMuch
from specdec.constraints.grammar.source import GrammarSource, TokenizerArguments
from specdec.constraints.limits.faults import GrammarError, too_many

MOST_CPU_S = 10.0
"""Seconds of processor time that one session's constraint may take apart."""
_FAIR_CPU_S = 0.5
"""Seconds of processor time that each session gets in turns with the others."""
_log = structlog.get_logger(__name__)
_CHILD = "specdec.constraints.grammar.apart_child"


class ApartFollower:
    """One session's place in its grammar, and the mask after its committed tokens, once it is known."""

    def __init__(self, key: int, source: GrammarSource, following: Following, ask: Callable[[ApartFollower], None]):
        self.key = key
        self.source = source
        self.following = following
        self.tokens: list[int] = []
        """Committed output tokens."""
        self.num_known = 0
        """Number of them that the process knows; written by the thread that asks it."""
        self.held_back: list[int] = []
        self.mask: NodeMask | None = None
        """What may follow the committed tokens; None: not known yet."""
        self.asked_s = 0.0
        """When the mask was asked for."""
        self.spent_s = 0.0
        """Seconds of processor time taken."""
        self.is_over = False
        self._ask = ask

    def commit(self, token_ids: Sequence[int], held_back: Collection[int]) -> None:
        """Move past tokens, and ask for the next mask without `held_back`, which `min_tokens` forbids. Returns at once;
        a forbidden token is a fault of the next mask."""
        self.mask = None
        self.asked_s = time.monotonic()
        self.tokens += token_ids
        self.held_back = list(held_back)
        self._ask(self)

    def give_up(self) -> None:
        """End the wait for the mask with an error."""
        self.mask = NodeMask(_no_words(self), fault=too_many(self.source.field))


class _Questions:
    """Sessions with a question, in the order of their turns; each has at most one open, and an end."""

    def __init__(self, asked: SimpleQueue[ApartFollower | None]) -> None:
        self._asked = asked
        self._waiting: list[tuple[bool, int, int, ApartFollower]] = []
        self._num_asked = 0
        self._is_over = False

    def next(self) -> ApartFollower | None:
        """Whose turn it is; waits for a question. None: nobody asks any more."""
        while not self._is_over and not (self._waiting and self._asked.empty()):
            follower = self._asked.get()
            if follower is None:
                self._is_over = True
                break
            self._num_asked += 1
            is_costly = follower.spent_s >= _FAIR_CPU_S and not follower.is_over
            turn = (is_costly, follower.key if is_costly else 0, self._num_asked, follower)
            heapq.heappush(self._waiting, turn)
        return None if self._is_over else heapq.heappop(self._waiting)[-1]


class ApartFollowers:
    """All constraints of one engine that are followed apart.

    The process has the lowest priority and one thread; it starts with the first constraint.
    """

    def __init__(self, tokenizer: TokenizerArguments) -> None:
        self._tokenizer = tokenizer
        self._num_keys = 0
        self._questions: SimpleQueue[ApartFollower | None] | None = None

    def follow(self, source: GrammarSource, following: Following) -> ApartFollower:
        """A follower at its start. Commit at least once: only then is the mask asked for."""
        if self._questions is None:
            self._questions = SimpleQueue()
            threading.Thread(
                target=_work, args=(self._questions, self._tokenizer), name="apart grammars", daemon=True
            ).start()
            weakref.finalize(self, self._questions.put, None)
        self._num_keys += 1
        return ApartFollower(self._num_keys, source, following, self._questions.put)

    def close(self, follower: ApartFollower) -> None:
        """Forget a follower whose session has ended."""
        follower.is_over = True
        if self._questions is not None:
            self._questions.put(follower)


def _work(asked: SimpleQueue[ApartFollower | None], tokenizer: TokenizerArguments) -> None:
    """Answer questions until None comes; the thread's body."""
    process: LineProcess | None = None
    known: set[int] = set()
    questions = _Questions(asked)
    while (follower := questions.next()) is not None:
        if follower.is_over and follower.key not in known:
            continue
        try:
            if process is None:
                process, known = LineProcess(_CHILD, {"tokenizer": tokenizer}), set()
                process.ask({"close": 0})  # reading the tokenizer is not the session's time
            if follower.is_over:
                known.discard(follower.key)
                process.ask({"close": follower.key})
                continue
            follower.mask = _answer(process, known, follower)
        except TookTooMuch:
            process = None
            follower.mask = _took_too_much(follower)
        except (ChildLost, OSError) as error:
            process = None
            follower.mask = _fault(follower, f"is too complex: {error}")
        except Exception as error:  # whatever one constraint's answer is, the others' masks must still come
            _log.exception("constraint_failed_apart")
            if process is not None:
                process.close()
            process = None
            follower.mask = _fault(follower, f"cannot be followed: {type(error).__name__}")
    if process is not None:
        process.close()


def _answer(process: LineProcess, known: set[int], follower: ApartFollower) -> NodeMask:
    tokens = list(follower.tokens)
    question: dict[str, Any] = {"key": follower.key, "held_back": follower.held_back}
    if follower.key not in known:
        known.add(follower.key)
        follower.num_known = 0
        question |= {"text": follower.source.text, "following": follower.following}
    question |= {"tokens": tokens[follower.num_known :], "field": follower.source.field}
    answer = process.ask(question, MOST_CPU_S - follower.spent_s)
    follower.num_known = len(tokens)
    follower.spent_s += answer["spent_s"]
    if "fault" in answer:
        return NodeMask(_no_words(follower), fault=GrammarError(follower.source.field, answer["fault"]))
    if follower.spent_s >= MOST_CPU_S:
        return _took_too_much(follower)
    words = None if answer["words"] is None else np.frombuffer(bytes.fromhex(answer["words"]), dtype=np.uint32)
    return NodeMask(words, answer["must_end"])


def _took_too_much(follower: ApartFollower) -> NodeMask:
    return _fault(follower, f"is too complex: it took more than {MOST_CPU_S:g} s of processor time")


def _fault(follower: ApartFollower, text: str) -> NodeMask:
    return NodeMask(_no_words(follower), fault=GrammarError(follower.source.field, text, reason="CONSTRAINT_TOO_SLOW"))


def _no_words(follower: ApartFollower) -> Any:
    return np.zeros(-(-follower.following["vocab_size"] // 32), dtype=np.uint32)
