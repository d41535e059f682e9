"""Requests that wait until their model is served: a gateway holds the first ones of a model that is scaled to zero."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client import Gauge

from specdec.wire.errors import Unavailable

_LOOK_S = 0.5
"""Seconds between two looks whether the model is served."""
_RETRY_S = 10.0
"""Seconds after which a client may try again that was held in vain."""
_NO_GAUGES: Mapping[str, Gauge] = MappingProxyType({})


class Hold:
    """Counts and bounds held requests. An autoscaler starts a model because the gauge counts its held requests."""

    def __init__(self, most_s: float = 0.0, most: int = 1, by_model: Mapping[str, Gauge] = _NO_GAUGES) -> None:
        """Hold nothing yet.

        Args:
            most_s: seconds from a request's arrival for which it may be held; 0: none is held.
            most: requests held at once.
            by_model: held requests by entry of the coordinators; may be empty if none is held.
        """
        self.most_s = most_s
        self._most = most
        self._by_model = by_model
        self._num = 0
        self.is_draining = False
        """Held requests are refused: the gateway ends before they could be served."""

    @property
    def holds(self) -> bool:
        """Whether requests are held at all."""
        return self.most_s > 0

    @contextmanager
    def call(self, model: str, arrived_s: float, serves: Callable[[], Awaitable[bool]]) -> Iterator[Waits]:
        """The waits of one call.

        Args:
            model: an entry of the coordinators.
            arrived_s: monotonic time of the request's arrival; minus infinity: it is not held.
            serves: tells whether a coordinator of the model serves.
        """
        waits = Waits(self, model, arrived_s + self.most_s, serves)
        try:
            yield waits
        finally:
            waits.end()

    def enter(self, model: str) -> None:
        """Take a place. Raises Unavailable if there is none."""
        if self._num >= self._most:
            raise Unavailable(
                f"the model is being started, and {self._most} requests wait for it (max_held_requests)",
                retry_after_s=_RETRY_S,
            )
        self._num += 1
        self._by_model[model].inc()

    def leave(self, model: str) -> None:
        """Free a place."""
        self._num -= 1
        self._by_model[model].dec()


@dataclass(slots=True)
class Waits:
    """The waits of one call between its attempts. It keeps one place from its first wait to its end."""

    _hold: Hold
    _model: str
    _ends_s: float
    _serves: Callable[[], Awaitable[bool]]
    _is_held: bool = False

    async def after(self, error: Unavailable) -> None:
        """Wait until the model is served, so that the call can be tried again.

        Raises `error` if requests are not held, and Unavailable if there is no place or the time is over.
        """
        if not self._hold.holds or (self._ends_s <= time.monotonic() and not self._is_held):
            raise error
        if not self._is_held:
            self._hold.enter(self._model)
            self._is_held = True
        while (left_s := self._ends_s - time.monotonic()) > 0 and not self._hold.is_draining:
            await asyncio.sleep(min(_LOOK_S, left_s))
            if await self._serves():
                return
        told = f"the model was not served within {self._hold.most_s:g} s (hold_s)"
        if self._hold.is_draining:
            told = "the gateway is shutting down, and the model is not served yet"
        raise Unavailable(f"{told}: {error.message}", retry_after_s=_RETRY_S, reason=error.reason) from error

    def end(self) -> None:
        """The call has an answer, or has ended: it waits no more."""
        if self._is_held:
            self._is_held = False
            self._hold.leave(self._model)
