"""Compiles unchecked grammars: `python -m specdec.constraints.grammar.checker_child`, started by GrammarChecker.

Each grammar is compiled in a process forked from this one, with bounds on processor time, memory and stack. A grammar
that exceeds them ends only that process. Requests and answers are JSON lines on standard input and output.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import signal
import sys
import time

from llguidance import LLMatcher, LLTokenizer

from specdec.constraints.grammar.apart_child import limit_memory
from specdec.constraints.grammar.source import TokenizerArguments, make_matcher, make_tokenizer, shown
from specdec.service.memory_limit import own_bytes
from specdec.service.process import die_with_parent, leave_signals_to_parent

_MOST_CPU_S = 0.5
_MOST_WALL_S = 5.0
"""Wall-clock seconds for one grammar on a busy machine."""
_MOST_BYTES = 512 * 2**20
"""Bytes beyond those of this process."""
_STACK_BYTES = 1 * 2**20
"""Bytes of stack; fewer than the compiler's threads have, so that the check overflows first."""
_MOST_ANSWER_BYTES = 4096
_MOST_MASK_S = 0.1
"""Processor seconds for one mask, for which all sessions of an engine wait."""
_NUM_WALKS = 2
_NUM_STEPS = 12


def main() -> int:
    """Answer until standard input ends."""
    start = json.loads(sys.stdin.readline())
    die_with_parent(start["parent_pid"])
    leave_signals_to_parent()
    os.nice(5)
    arguments: TokenizerArguments = start["tokenizer"]
    tokenizer = make_tokenizer(arguments)
    _, any_bytes = _check_apart(tokenizer, LLMatcher.grammar_from_regex("a"))  # of every child, whatever it compiles
    for line in sys.stdin:
        error, num_bytes = _check_apart(tokenizer, json.loads(line))
        num_bytes = max(0, num_bytes - any_bytes)
        sys.stdout.write(json.dumps({"error": error, "num_bytes": num_bytes}) + "\n")
        sys.stdout.flush()
    return 0


def _check_apart(tokenizer: LLTokenizer, text: str) -> tuple[str, int]:
    """The error text, empty if the grammar compiles, and the bytes that it took."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            _limit()
            before = own_bytes()
            error = _check(tokenizer, text).encode()[:_MOST_ANSWER_BYTES]
            os.write(writer, b"%d=" % max(0, own_bytes() - before) + error)
        os._exit(0)
    os.close(writer)
    deadline_s = time.monotonic() + _MOST_WALL_S
    answer = b""
    while (left_s := deadline_s - time.monotonic()) > 0:
        if not select.select([reader], [], [], left_s)[0]:
            break
        piece = os.read(reader, _MOST_ANSWER_BYTES + 64)
        if not piece:
            break
        answer += piece
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not answer:
        return "is too complex: compiling it takes too much", 0
    num_bytes, _, error = answer.partition(b"=")
    return error.decode("utf-8", "replace"), int(num_bytes)


def _check(tokenizer: LLTokenizer, text: str) -> str:
    try:
        matcher = make_matcher(tokenizer, text, with_mask=False)
    except ValueError as error:
        return str(error) or "is not valid"
    start = matcher.deep_copy()
    faults = (_fault_on_the_way(start.deep_copy(), random.Random(seed)) for seed in range(_NUM_WALKS))
    return next(filter(None, faults), "")


def _fault_on_the_way(matcher: LLMatcher, rng: random.Random) -> str:
    """Walk a random path through the grammar and bound the cost of its masks."""
    for step in range(_NUM_STEPS):
        before_s = time.process_time()
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return shown(matcher.get_error()) if step == 0 else "is too complex: a mask takes too much"
        if time.process_time() - before_s > _MOST_MASK_S:
            return "is too complex: a mask takes too long"
        first = rng.randrange(max(1, bits.bit_length()))
        above = bits >> first << first or bits
        token = (above & -above).bit_length() - 1
        if token < 0 or matcher.try_consume_tokens([token]) != 1:
            return ""
    return ""


def _limit() -> None:
    limit_memory(_MOST_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # a killed child's messages would only fill the log
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _MOST_CPU_S)


if __name__ == "__main__":
    raise SystemExit(main())
