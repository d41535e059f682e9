"""`SetDrafters`: the drafters of a target are replaced between two steps, while sessions run.

A thread reads the files of heads while steps run. The drafters change all at once, when all new ones are loaded and
fit; until then nothing changes. A thread that hangs cannot be ended: no other head is loaded until it ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError
from google.rpc import code_pb2

from specdec.config.drafter_options import DrafterOptions, HeadOptions, parse_drafters
from specdec.drafting.interface import Drafter, OfNoUse
from specdec.engine.errors import ModelLoadError
from specdec.replica.bridge.engine_answers import EngineAnswers
from specdec.replica.worker.errors import SessionFailure, invalid
from specdec.target_service.proposals.local_drafters import LocalDrafters
from specdec.v1 import target_pb2

_MOST_CHARS = 800
"""Most characters of a refusal's reason."""
_log = structlog.get_logger("specdec.replica.worker")


class _Load:
    """A thread that loads heads one after the other."""

    def __init__(self, make: Callable[[DrafterOptions], Drafter], heads: Sequence[HeadOptions]) -> None:
        self.made: dict[str, tuple[DrafterOptions, Drafter]] = {}
        self.error: Exception | None = None
        self.name = ""
        """Name of the head that is loading, or that was loaded last."""
        self._is_wanted = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(make, heads), name="drafter-load", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Drop the loaded heads, and any that the thread still loads."""
        with self._lock:
            self._is_wanted = False
            self.made.clear()

    def _run(self, make: Callable[[DrafterOptions], Drafter], heads: Sequence[HeadOptions]) -> None:
        for options in heads:
            self.name = options.method
            try:
                drafter = make(options)  # type: ignore[arg-type]
            except Exception as error:
                self.error = error
                return
            with self._lock:
                if not self._is_wanted:
                    return
                self.made[options.method] = options, drafter  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class _Change:
    """A `SetDrafters` call under way."""

    call_id: int
    names: list[str]
    others: list[DrafterOptions]
    """Options of new drafters that are no heads; they are made between two steps."""
    load: _Load | None
    began_s: float
    timeout_s: float


class DrafterSwap:
    """Handles `SetDrafters`, one call at a time; a CallHandler."""

    def __init__(
        self,
        local_drafters: LocalDrafters,
        answers: EngineAnswers,
        on_changed: Callable[[Collection[str]], None],
        load_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_changed` is called after each change with the names of new drafters; `load_timeout_s`: seconds that heads
        may take to load.
        """
        self._local_drafters = local_drafters
        self._answers = answers
        self._on_changed = on_changed
        self._load_timeout_s = load_timeout_s
        self._clock = clock
        self._change: _Change | None = None
        self._load: _Load | None = None
        """The last load, which may go on after its call has ended."""

    @property
    def is_under_way(self) -> bool:
        """Whether a call waits for its heads."""
        return self._change is not None

    def call(self, call_id: int, request: bytes) -> None:
        """Begin a change; without heads to load it also ends here.

        Raises SessionFailure: the request is malformed, or another change or load is under way.
        """
        wanted, timeout_s = self._read(request)
        if self._change is not None:
            raise _busy("the drafters are being set by somebody else")
        new = [options for options in wanted if not self._local_drafters.has(options)]
        heads = [options for options in new if isinstance(options, HeadOptions)]
        if heads and self._load is not None and not self._load.is_over:
            raise _busy(f"{self._load.name} was given up, but has not ended to load: until then there is no other head")
        self._load = _Load(self._local_drafters.make, heads) if heads else self._load
        self._change = _Change(
            call_id,
            [options.method for options in wanted],
            [options for options in new if not isinstance(options, HeadOptions)],
            self._load if heads else None,
            self._clock(),
            timeout_s,
        )
        self.poll()

    def call_ended(self, call_id: int) -> None:
        """Give up a change whose caller has gone."""
        if self._change is not None and self._change.call_id == call_id:
            self._give_up(self._change)

    def poll(self) -> None:
        """Between two steps: make the change if its heads are loaded, refuse it if they failed or took too long."""
        change = self._change
        if change is None:
            return
        load = change.load
        if load is not None and not load.is_over:
            if self._clock() - change.began_s >= change.timeout_s:
                self._give_up(change)
                message = f"drafters: {load.name}: not loaded after {change.timeout_s:g} s; nothing is changed"
                failure = SessionFailure(code_pb2.DEADLINE_EXCEEDED, "DRAFTER_LOAD_TIMEOUT", message)
                self._answers.refuse(change.call_id, failure.to_status())
            return
        self._change = None
        try:
            self._finish(change)
        except SessionFailure as failure:
            self._answers.refuse(change.call_id, failure.to_status())

    def _read(self, request: bytes) -> tuple[tuple[DrafterOptions, ...], float]:
        try:
            message = target_pb2.SetDraftersRequest.FromString(request)
        except DecodeError as error:
            raise invalid("request", "the message does not parse") from error
        try:
            wanted = parse_drafters(message.drafters)
        except ValueError as error:
            raise invalid("drafters", str(error)[:_MOST_CHARS]) from error
        timeout_s = self._load_timeout_s
        if message.HasField("load_timeout_ms"):
            timeout_s = min(timeout_s, message.load_timeout_ms * 1e-3)
        return wanted, timeout_s

    def _give_up(self, change: _Change) -> None:
        self._change = None
        if change.load is not None:
            change.load.give_up()

    def _finish(self, change: _Change) -> None:
        made: dict[str, tuple[DrafterOptions, Drafter]] = {}
        if change.load is not None:
            self._load = None
            if change.load.error is not None:
                raise _refused(change.load.name, change.load.error)
            made |= change.load.made
        for options in change.others:
            try:
                made[options.method] = options, self._local_drafters.make(options)
            except (ModelLoadError, OfNoUse) as error:
                raise _refused(options.method, error) from error
        before = self._local_drafters.names
        try:
            self._local_drafters.replace(change.names, made)
        except ModelLoadError as error:
            raise _refused("", error) from error
        _log.info("drafters_set", drafters=self._local_drafters.names, before=before, new=sorted(made))
        self._on_changed(made)
        asked = target_pb2.SetDraftersResponse(
            drafters=self._local_drafters.names, drafter_options=self._local_drafters.told_options
        )
        self._answers.answer(change.call_id, asked)


def _busy(message: str) -> SessionFailure:
    return SessionFailure(code_pb2.RESOURCE_EXHAUSTED, "DRAFTERS_LOADING", f"drafters: {message}; nothing is changed")


def _refused(name: str, error: Exception) -> SessionFailure:
    """The refusal of a drafter; its text begins with the drafter's name."""
    text = str(error) if isinstance(error, ModelLoadError | OfNoUse) else repr(error)
    text = text.removeprefix("drafters: ")
    if name and not text.startswith(f"{name}: "):
        text = f"{name}: {text}"
    _log.warning("drafter_refused", error=text)
    return SessionFailure(
        code_pb2.FAILED_PRECONDITION, "DRAFTER_REFUSED", f"drafters: {text[:_MOST_CHARS]}; nothing is changed"
    )
