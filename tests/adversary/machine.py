"""Whether the machine, rather than a service, held streams up: waits for processors, and the clients' own lag."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")
_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class Strain:
    """What held up everybody for some time."""

    waited: float
    """Fraction of the time in which some process was ready and had no processor; nan if the kernel does not tell."""
    lag_s: float
    """The longest time by which the clients' own event loop was late."""


class Machine:
    """Watches the machine while `watch` runs."""

    def __init__(self, pressure: Path = PRESSURE) -> None:
        self._pressure = pressure
        self._worst_lag_s = 0.0
        self._since = time.monotonic(), self._waited_s()

    async def watch(self) -> None:
        """Watch until cancelled."""
        while True:
            due_s = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._worst_lag_s = max(self._worst_lag_s, time.monotonic() - due_s)

    def take(self) -> Strain:
        """The strain since the last call, or the beginning."""
        now = time.monotonic(), self._waited_s()
        (began_s, waited_s), self._since = self._since, now
        strain = Strain((now[1] - waited_s) / max(now[0] - began_s, 1e-9), self._worst_lag_s)
        self._worst_lag_s = 0.0
        return strain

    def _waited_s(self) -> float:
        try:
            some = self._pressure.read_text(encoding="ascii").splitlines()[0]
            return int(some.rpartition("total=")[2]) * 1e-6
        except (OSError, ValueError, IndexError):
            return float("nan")
