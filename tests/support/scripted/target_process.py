"""A scripted target as a process, which can be killed."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from tests.support.scripted.target import ScriptedTarget

_START_S = 60.0


@dataclass(frozen=True)
class TargetProcess:
    """A running one."""

    address: str
    _process: BaseProcess

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()


@contextmanager
def target_process(step_s: float) -> Iterator[TargetProcess]:
    """Start one, with `step_s` seconds between two steps of all its sessions; it is killed at the end."""
    processes = multiprocessing.get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_serve, args=(sender, step_s), daemon=True)
    process.start()
    try:
        if not receiver.poll(_START_S):
            raise TimeoutError(f"the target did not start within {_START_S:g} s")
        yield TargetProcess(receiver.recv(), process)
    finally:
        process.kill()
        process.join()


def _serve(sender: Connection, step_s: float) -> None:
    async def serve() -> None:
        target = ScriptedTarget()
        target.step_s = step_s
        await target.start()
        sender.send(target.address)
        await asyncio.Event().wait()

    asyncio.run(serve())
