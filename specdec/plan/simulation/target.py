"""A target of a fleet: one event per step over all its sessions."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from specdec.plan.inputs.step_times import StepTable
from specdec.plan.inputs.traffic import Arrival
from specdec.plan.simulation.core import SharedCore
from specdec.plan.simulation.curve import ReplicaCurve
from specdec.plan.simulation.draft_pool import DraftPool
from specdec.plan.simulation.tally import RunTally
from specdec.v1 import common_pb2 as pb

_REPORT_S = 0.25
"""Seconds between two load reports of a replica."""
_GROWTH = 2
_BLOCK_TOKENS = 16


class TargetLost(Exception):
    """The target ended; its streams go on elsewhere."""


@dataclass(slots=True, eq=False)
class Stream:
    """A request while it runs."""

    request: Arrival
    arrived_s: float
    """When it first arrived, less the time of the first token's way back; later tries count from then."""
    produced: int = 0
    """Committed output tokens."""
    first_s: float | None = None
    """When its first token was committed; None: it has none."""
    last_s: float | None = None
    """When its last token was committed, as far as its target has told."""
    speculates: bool = True
    done: asyncio.Future[None] | None = None
    """Set while it is at a target."""

    @property
    def left(self) -> int:
        """Output tokens that are still to come."""
        return self.request.output_tokens - self.produced


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """A target, as all of a fleet are."""

    curve: ReplicaCurve
    """With speculation as the deployment has it."""
    plain: ReplicaCurve
    """Without speculation."""
    steps: StepTable
    kv_tokens: float
    """Tokens whose keys and values fit."""
    max_sessions: int = 256
    max_batch_seqs: int = 64
    max_batch_tokens: int = 512
    """Rows of a step; prompts take what decoding leaves."""


@dataclass(slots=True, eq=False)
class SimulatedTarget:
    """One replica. `open` and `end` are called by coordinators and faults, the rest runs by itself."""

    name: str
    node: str
    zone: str
    env: simpy.Environment
    settings: TargetSettings
    tally: RunTally
    rng: np.random.Generator
    core: SharedCore | None = None
    """Processor that it shares with others; None: it computes alone."""
    drafts: DraftPool | None = None
    """Drafts on devices of their own; None: none, or `settings.curve` has them in the target."""
    is_up: bool = True
    is_draining: bool = False
    generation: int = 0
    """Number of its lives."""
    holder: str = field(init=False)
    """Name of its prefix cache, another one in each life."""
    load: pb.LoadReport = field(init=False)
    """Its last report."""
    report_number: int = 0
    """Number of its last report."""
    busy_s: float = 0.0
    kv_used: float = 0.0
    """Tokens whose keys and values it holds, and those to come of the sessions that it has."""
    _next_report_s: float = 0.0
    _decoding: list[Stream] = field(default_factory=list)
    _left: np.ndarray = field(default_factory=lambda: np.zeros(64, dtype=np.int64))
    _last_s: np.ndarray = field(default_factory=lambda: np.zeros(64))
    _prompts: deque[tuple[Stream, int]] = field(default_factory=deque)
    """Sessions without a first token, and tokens of their prompts that are not computed."""
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Blocks of prompts whose keys and values it has, the latest last."""
    _beginning: list[Stream] = field(default_factory=list)
    """Sessions whose prompts the present step finishes."""
    _num_plain: int = 0
    _turn: int = 0
    _work: simpy.Event | None = None
    _process: simpy.Process | None = None

    def __post_init__(self) -> None:
        self.holder = f"{self.name}#0"
        self.load = self._report()
        self._process = self.env.process(self._steps())

    @property
    def num_sessions(self) -> int:
        """Sessions that it holds."""
        return len(self._decoding) + len(self._prompts) + len(self._beginning)

    def open(self, stream: Stream) -> bool:
        """Take a stream with its prompt and the tokens that it has; False: it is full."""
        settings, need = self.settings, self._need(stream)
        is_full = self.num_sessions >= settings.max_sessions or self.kv_used + need > settings.kv_tokens
        if not self.is_up or self.is_draining or (is_full and self.num_sessions > 0):
            return False
        self.kv_used += need
        self._num_plain += not stream.speculates
        num_cached = self._num_cached(stream)
        self.tally.num_prompt_tokens += stream.request.prompt_tokens
        self.tally.num_cached_tokens += num_cached
        self._prompts.append((stream, stream.request.prompt_tokens + stream.produced - num_cached))
        self._tell_if_due()
        if self._work is not None and not self._work.triggered:
            self._work.succeed()
        return True

    def freeze(self) -> None:
        """It computes no more, and nobody is told yet."""
        if self._process is not None:
            self._process.interrupt()
            self._process = None

    def end(self) -> None:
        """It ends at once: its streams are told."""
        self.is_up = False
        for index, stream in enumerate(self._decoding):
            self._note(index, stream)
        streams = [*self._decoding, *self._beginning, *(stream for stream, _ in self._prompts)]
        self._decoding.clear()
        self._beginning.clear()
        self._prompts.clear()
        self.kv_used, self._num_plain = 0.0, 0
        self.freeze()
        for stream in streams:
            if stream.done is not None and not stream.done.done():
                stream.done.set_exception(TargetLost(self.name))

    def abandon(self, stream: Stream) -> None:
        """Its coordinator is gone: the stream ends here, and keeps the tokens that it has."""
        if stream in self._decoding:
            index = self._decoding.index(stream)
            self._note(index, stream)
            self._remove(index)
        elif stream in self._beginning:
            self._beginning.remove(stream)
        elif any(each is stream for each, _ in self._prompts):
            self._prompts = deque((each, left) for each, left in self._prompts if each is not stream)
        else:
            return
        self._forget(stream)

    def begin(self) -> None:
        """It is there again, with an empty cache."""
        self.is_up, self.is_draining, self.generation = True, False, self.generation + 1
        self.holder = f"{self.name}#{self.generation}"
        self._cached.clear()
        self._tell()
        self._process = self.env.process(self._steps())

    def drain(self) -> None:
        """It takes no more sessions."""
        self.is_draining = True
        self._tell()

    def _num_cached(self, stream: Stream) -> int:
        """Tokens of a prompt that it has; they count as used from now on, and so do the prompt's others."""
        prefix = stream.request.prefix
        if not prefix:
            return 0
        each = stream.request.prompt_tokens // len(prefix)
        num = next((number for number, block in enumerate(prefix) if block not in self._cached), len(prefix))
        for block in prefix:
            self._cached[block] = None
            self._cached.move_to_end(block)
        while len(self._cached) * each > self.settings.kv_tokens:
            self._cached.popitem(last=False)
        return max(0, min(num * each, stream.request.prompt_tokens - 1))

    def _need(self, stream: Stream) -> float:
        return stream.request.prompt_tokens + stream.request.output_tokens

    def _steps(self) -> Generator[simpy.Event, Any, None]:
        try:
            while True:
                if not self.num_sessions:
                    self._tell()
                    self._work = self.env.event()
                    yield self._work
                num = min(len(self._decoding), self.settings.max_batch_seqs)
                step_s = self._decode_s(num)
                num_rows = self._chunk(num)
                if num_rows:
                    step_s += self.settings.steps.prompt_seconds(num_rows, num)
                if self.core is None:
                    yield self.env.timeout(step_s)
                else:
                    yield from self.core.work(step_s)
                self.busy_s += step_s
                self._commit(num)
                self._begin()
                self._tell_if_due()
        except simpy.Interrupt:
            return

    @property
    def _curve(self) -> ReplicaCurve:
        return self.settings.curve if self.drafts is None else self.drafts.curve

    @property
    def _undrafted(self) -> float:
        """Part of its sessions whose draft is gone."""
        return 0.0 if self.drafts is None else self.drafts.plain_share

    def _decode_s(self, num: int) -> float:
        if not num:
            return 0.0
        share = self._num_plain / self.num_sessions
        share += (1 - share) * self._undrafted
        curve_s = self._curve.turn_s(num, self.rng) if share < 1 else 0.0
        return curve_s * (1 - share) + (self.settings.plain.turn_s(num, self.rng) * share if share else 0.0)

    def _chunk(self, num: int) -> int:
        """Take the prompts, or parts of them, that a step computes beside `num` decoding sessions; returns the rows."""
        room, num_rows = max(1, self.settings.max_batch_tokens - num), 0
        while self._prompts and num_rows < room:
            stream, left = self._prompts.popleft()
            part = min(left, room - num_rows)
            num_rows += part
            if part < left:
                self._prompts.appendleft((stream, left - part))
            else:
                self._beginning.append(stream)
        return num_rows

    def _commit(self, num: int) -> None:
        """The step's `num` sessions commit tokens; beyond `max_batch_seqs` sessions take turns."""
        held, now_s = len(self._decoding), float(self.env.now)
        num = min(num, held)  # streams may have been abandoned meanwhile
        if not num:
            return
        if num == held:
            rows: Any = slice(0, num)
        else:
            rows = (self._turn + np.arange(num)) % held
            self._turn = (self._turn + num) % held
        tokens = self._curve.tokens(num, num, self.rng)
        if self._num_plain:
            is_plain = np.array([not self._decoding[i].speculates for i in np.arange(held)[rows]])
            tokens = np.where(is_plain, 1, tokens)
        if self._undrafted:
            tokens = np.where(self.rng.random(num) < self._undrafted, 1, tokens)
        tokens = np.minimum(tokens, self._left[rows])
        self._left[rows] -= tokens
        self.tally.committed(self._last_s[rows], now_s, tokens)
        self._last_s[rows] = now_s
        ended = np.nonzero(self._left[:held] == 0)[0]
        for index in ended[::-1]:
            self._finish(int(index))

    def _finish(self, index: int) -> None:
        stream = self._decoding[index]
        self._remove(index)
        self._close(stream)

    def _note(self, index: int, stream: Stream) -> None:
        """Write what a session has into its stream."""
        stream.produced = stream.request.output_tokens - int(self._left[index])
        stream.last_s = float(self._last_s[index])

    def _remove(self, index: int) -> None:
        last, end = self._decoding.pop(), len(self._decoding)
        if index != end:
            self._decoding[index] = last
            self._left[index], self._last_s[index] = self._left[end], self._last_s[end]

    def _forget(self, stream: Stream) -> None:
        self.kv_used -= self._need(stream)
        self._num_plain -= not stream.speculates

    def _close(self, stream: Stream) -> None:
        stream.produced, stream.last_s = stream.request.output_tokens, float(self.env.now)
        self._forget(stream)
        if stream.done is not None and not stream.done.done():
            stream.done.set_result(None)

    def _begin(self) -> None:
        """Prompts are computed: each session commits a token."""
        now_s, streams = float(self.env.now), self._beginning[:]
        self._beginning.clear()
        for stream in streams:
            if stream.first_s is None:
                stream.first_s = now_s
                self.tally.begun(stream.arrived_s, now_s)
                self.tally.num_tokens += now_s >= self.tally.from_s
            else:
                self.tally.committed(np.array([stream.last_s or now_s]), now_s, np.ones(1, dtype=np.int64))
            stream.produced += 1
            stream.last_s = now_s
            if not stream.left:
                self._close(stream)
                continue
            index = len(self._decoding)
            if index == len(self._left):
                self._left = np.resize(self._left, _GROWTH * index)
                self._last_s = np.resize(self._last_s, _GROWTH * index)
            self._decoding.append(stream)
            self._left[index], self._last_s[index] = stream.left, now_s

    def _tell_if_due(self) -> None:
        if self.env.now >= self._next_report_s:
            self._tell()

    def _tell(self) -> None:
        self._next_report_s = float(self.env.now) + _REPORT_S
        self.report_number += 1
        self.load = self._report()

    def _report(self) -> pb.LoadReport:
        waiting = sum(left for _, left in self._prompts)
        return pb.LoadReport(
            num_running=len(self._decoding),
            num_waiting=len(self._prompts),
            num_waiting_tokens=waiting,
            num_sessions=self.num_sessions,
            max_sessions=self.settings.max_sessions,
            kv_blocks_used=round(self.kv_used / _BLOCK_TOKENS),
            kv_blocks_total=max(1, round(self.settings.kv_tokens / _BLOCK_TOKENS)),
            draining=self.is_draining,
        )
