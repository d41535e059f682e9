"""Compiles constraints on threads of their own. Cached ones are returned at once; tenants take turns for the others."""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from google.rpc import code_pb2
from llguidance import LLMatcher, LLTokenizer

from specdec.constraints.grammar.checker import GrammarChecker
from specdec.constraints.grammar.figures import GrammarFigures
from specdec.constraints.grammar.held import HeldConstraints, Holding
from specdec.constraints.grammar.source import (
    GrammarSource,
    TokenizerArguments,
    grammar_source,
    make_matcher,
    without_tokens_from,
)
from specdec.constraints.grammar.source import make_tokenizer as _make_tokenizer
from specdec.constraints.grammar.structural_tags import SpecialTokens
from specdec.constraints.limits.faults import GrammarError
from specdec.service.memory_limit import limit_bytes
from specdec.v1 import common_pb2 as pb

_MOST_CACHED = 32
_MOST_FAULTS = 256
_MOST_WAITING = 256
"""Queued grammars above which a request is refused."""
_NUM_THREADS = 2
_MEMORY_PART = 8
"""One eighth of the process's memory, at most, is for constraints."""
_STACK_BYTES = 16 * 2**20


@dataclass(slots=True, weakref_slot=True, eq=False)
class Compilation:
    """A grammar that is or will be compiled. One thread writes it; others read it once it `is_done`."""

    source: GrammarSource
    tenant: bytes
    """Who asked first."""
    done: threading.Event = field(default_factory=threading.Event)
    matcher: LLMatcher | None = None
    """Result, to be copied for each session."""
    fault: str = ""
    """Error text; empty: none."""
    num_asked: int = 1
    """Requests for it since it was cached."""
    code: int = code_pb2.INVALID_ARGUMENT
    on_grown: Callable[[int], str] = lambda num_bytes: ""
    """Counts bytes by which the automaton has grown; returns why it must not be used on, empty: it may."""
    debt_s: float = 0.0
    """Seconds by which its sessions' masks have exceeded the budgets of steps; only the engine's thread uses it."""

    @property
    def is_done(self) -> bool:
        """Whether there is a result."""
        return self.done.is_set()

    def result(self) -> LLMatcher:
        """A fresh copy of the matcher, at its start. Call only when done. Raises GrammarError."""
        if self.matcher is None:
            raise GrammarError(self.source.field, self.fault, self.code)
        return self.matcher.deep_copy()


class GrammarCompiler:
    """Compiles constraints for one tokenizer. Any thread may call all methods; they return at once.

    A grammar is compiled twice: in a child process that it may kill (`GrammarChecker`), then here without a lock.
    Recent results and errors are cached.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...], most_bytes: int | None = None
    ) -> None:
        """Read the tokenizer.

        Args:
            tokenizer_json: text of the file `tokenizer.json`.
            vocab_size: token ids that a mask covers.
            eos_token_ids: tokens that may follow a complete output; at least one.
            most_bytes: memory of all constraints that exist; None: a part of what the process may use.

        Raises:
            ValueError: llguidance does not support the tokenizer, or `eos_token_ids` is empty.
        """
        if not eos_token_ids:
            raise ValueError("no token ends a sequence")
        self.arguments = TokenizerArguments(tokenizer=tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        try:
            self._tokenizer: LLTokenizer = _make_tokenizer(self.arguments)
        except ValueError:  # the tokenizer may have more tokens than the model
            tokenizer_json = self.arguments["tokenizer"] = without_tokens_from(vocab_size, tokenizer_json)
            self._tokenizer = _make_tokenizer(self.arguments)
        self._special_tokens = SpecialTokens.of_tokenizer(self._tokenizer, tokenizer_json)
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.figures = GrammarFigures()
        self._held = HeldConstraints(limit_bytes() // _MEMORY_PART if most_bytes is None else most_bytes)
        self._lock = threading.Condition()
        self._known: OrderedDict[bytes, Compilation] = OrderedDict()
        self._waiting: OrderedDict[bytes, deque[Compilation]] = OrderedDict()
        """Queues by tenant; the next tenant's is first."""
        self._threads: list[threading.Thread] = []

    def compile(self, constraint: pb.Constraint, tenant: bytes) -> Compilation:
        """Start compiling a constraint, or return the cached result. Raises GrammarError for errors visible at once."""
        source = grammar_source(constraint, self._special_tokens)
        key = hashlib.sha256(f"{source.field}\0{source.text}".encode()).digest()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                known.num_asked += 1
                self._known.move_to_end(key)
                return known
            if sum(map(len, self._waiting.values())) >= _MOST_WAITING:
                raise GrammarError(
                    "constraint", "too many constraints are being compiled; retry later", code_pb2.RESOURCE_EXHAUSTED
                )
            compilation = self._known[key] = Compilation(source, tenant)
            self._waiting.setdefault(tenant, deque()).append(compilation)
            self._forget()
            self._start()
            self._lock.notify()
        return compilation

    @property
    def num_cached(self) -> int:
        """Number of cached grammars, without cached errors."""
        with self._lock:
            return sum(known.matcher is not None for known in self._known.values())

    def _forget(self) -> None:
        """Drop the least recently used grammars and errors beyond their limits."""
        for is_fault, most in ((False, _MOST_CACHED), (True, _MOST_FAULTS)):
            done = [key for key, known in self._known.items() if known.is_done and bool(known.fault) == is_fault]
            for key in done[: max(0, len(done) - most)]:
                del self._known[key]

    def _start(self) -> None:
        if len(self._threads) >= _NUM_THREADS or len(self._threads) > sum(map(len, self._waiting.values())):
            return
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        self._threads.append(thread)

    def _work(self) -> None:
        checker = GrammarChecker(self.arguments)
        while True:
            compilation = self._take()
            started_s = time.monotonic()
            try:
                compilation.fault, num_bytes = checker.check(compilation.source.text)
                if not compilation.fault and self._may_hold(compilation, num_bytes):
                    compilation.matcher = make_matcher(self._tokenizer, compilation.source.text)
            except ValueError as error:
                compilation.fault = str(error) or "is not valid"
            except Exception as error:
                compilation.fault = f"could not be compiled: {type(error).__name__}"
                compilation.code = code_pb2.INTERNAL
            if compilation.fault:
                compilation.source = replace(compilation.source, text="")  # the cache of faults needs none
            self.figures.compiled(time.monotonic() - started_s)
            compilation.done.set()
            del compilation  # until the next comes it may be dropped

    def _may_hold(self, compilation: Compilation, num_bytes: int) -> bool:
        """Whether there is memory for a constraint, perhaps after cached ones are dropped; else it has a fault."""
        num_bytes += len(compilation.source.text)
        with self._lock:
            done = [key for key, known in self._known.items() if known.matcher is not None]
            while (refusal := self._held.refusal(compilation.tenant, num_bytes)) and done:
                del self._known[done.pop(0)]
            if refusal:
                compilation.fault, compilation.code = refusal, code_pb2.RESOURCE_EXHAUSTED
                for key in [key for key, known in self._known.items() if known is compilation]:
                    del self._known[key]  # it may be asked for again
                return False
            holding = self._held.hold(compilation, compilation.tenant, num_bytes)
        compilation.on_grown = partial(self._grew, weakref.ref(compilation), holding)
        return True

    def _grew(self, grown: weakref.ref[Compilation], holding: Holding, num_bytes: int) -> str:
        with self._lock:
            others = [key for key, known in self._known.items() if known.matcher is not None and known is not grown()]
            while (refusal := self._held.grow(holding, num_bytes)) and others:
                num_bytes = 0
                del self._known[others.pop(0)]
        return refusal

    def _take(self) -> Compilation:
        with self._lock:
            while not self._waiting:
                self._lock.wait()
            tenant, queue = self._waiting.popitem(last=False)
            compilation = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            return compilation
