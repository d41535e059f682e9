"""Follows costly constraints: `python -m specdec.constraints.grammar.apart_child`, started by `ApartFollowers`."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

from llguidance import LLTokenizer

from specdec.constraints.grammar.follower import GrammarFollower
from specdec.constraints.grammar.source import make_matcher, make_tokenizer
from specdec.constraints.limits.faults import GrammarError
from specdec.service.memory_limit import limit_bytes
from specdec.service.process import die_with_parent, leave_signals_to_parent

_NICENESS = 19
_MOST_BYTES = 2 * 2**30
"""Bytes beyond those of the process at its start, at most; an eighth of the service's limit, if that is less."""


def main() -> int:
    """Answer until standard input ends."""
    start = json.loads(sys.stdin.readline())
    die_with_parent(start["parent_pid"])
    leave_signals_to_parent()
    os.nice(_NICENESS)
    tokenizer = make_tokenizer(start["tokenizer"])
    limit_memory(_MOST_BYTES)
    followers: dict[int, GrammarFollower] = {}
    for line in sys.stdin:
        question = json.loads(line)
        began_s = time.process_time()
        answer = _answer(tokenizer, followers, question)
        answer["spent_s"] = time.process_time() - began_s
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


def limit_memory(more_bytes: int) -> None:
    """Bound the process's memory to `more_bytes` beyond what it has, or an eighth of what its service may have."""
    more_bytes = min(more_bytes, limit_bytes() // 8)
    with open("/proc/self/statm", encoding="ascii") as statm:
        own_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own_bytes + more_bytes, own_bytes + more_bytes))


def _answer(tokenizer: LLTokenizer, followers: dict[int, GrammarFollower], question: dict[str, Any]) -> dict[str, Any]:
    if "close" in question:
        followers.pop(question["close"], None)
        return {}
    key, field = question["key"], question["field"]
    try:
        if "text" in question:
            matcher = make_matcher(tokenizer, question["text"])
            followers[key] = GrammarFollower(matcher, field, **question["following"])
        followers[key].commit(question["tokens"])
    except (GrammarError, ValueError) as error:
        return {"fault": str(error)}
    mask = followers[key].masks((), (), (question["held_back"],))[0]
    if mask.fault is not None:
        return {"fault": str(mask.fault)}
    return {"words": None if mask.words is None else mask.words.tobytes().hex(), "must_end": mask.must_end}


if __name__ == "__main__":
    raise SystemExit(main())
