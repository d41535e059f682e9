"""Where the product meets the world (clock, chance, sockets, processes), and what it meets there in a simulation.

No code of the product knows of this: names in its modules are exchanged while the simulation runs, and only then.
"""

from __future__ import annotations

import inspect
import random
import sys
import time
import types
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import specdec.coordinator.connections
import specdec.coordinator.service
import specdec.replica.bridge.link_dialer
import specdec.replica.bridge.replica_service
import specdec.wire.backoff
import specdec.wire.discovery
from tests.protocol.simulation.virtual_loop import VirtualLoop

_monotonic_s = time.monotonic
_running: list[VirtualLoop] = []


def _now_s() -> float:
    return _running[-1].time() if _running else _monotonic_s()


@cache
def _rebind_clocks() -> int:
    """Functions that took the clock as a default keep it; they get one that is virtual while a simulation runs.

    Returns how many there were.
    """
    num_rebound = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("specdec.") and isinstance(module, types.ModuleType):
            for value in list(vars(module).values()):
                members = list(vars(value).values()) if inspect.isclass(value) else [value]
                num_rebound += sum(_rebind(member) for member in members if isinstance(member, types.FunctionType))
    return num_rebound


def _rebind(function: types.FunctionType) -> bool:
    is_clock = [default is _monotonic_s for default in function.__defaults__ or ()]
    if any(is_clock):
        pairs = zip(function.__defaults__ or (), is_clock, strict=True)
        function.__defaults__ = tuple(_now_s if is_it else default for default, is_it in pairs)
    by_name = [key for key, default in (function.__kwdefaults__ or {}).items() if default is _monotonic_s]
    for key in by_name:
        function.__kwdefaults__[key] = _now_s
    cells = [cell for cell in function.__closure__ or () if _content(cell) is _monotonic_s]  # dataclasses' factories
    for cell in cells:
        cell.cell_contents = _now_s
    return any(is_clock) or bool(by_name) or bool(cells)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


class Seams:
    """What one simulation puts in the place of the world."""

    def __init__(
        self, loop: VirtualLoop, rng: random.Random, *, open_channel: Any, open_store: Any, make_engine: Any
    ) -> None:
        """Take replacements for ReplicaChannel, `open_store` and EngineProcess."""
        _rebind_clocks()
        self._loop = loop
        self._patches = [
            (time, "monotonic", _now_s),
            (uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4)),
            (specdec.wire.backoff, "random", rng),
            (specdec.wire.discovery, "random", rng),
            (specdec.coordinator.connections, "ReplicaChannel", open_channel),
            (specdec.replica.bridge.link_dialer, "ReplicaChannel", open_channel),
            (specdec.coordinator.service, "open_store", open_store),
            (specdec.replica.bridge.replica_service, "EngineProcess", make_engine),
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The product sees the simulated world."""
        with ExitStack() as stack:
            for owner, name, value in self._patches:
                stack.enter_context(patch.object(owner, name, value))
            _running.append(self._loop)
            try:
                yield
            finally:
                _running.pop()
