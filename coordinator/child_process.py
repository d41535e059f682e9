"""The supervisor's side of one coordinator process, and the port that several of them share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import structlog
from pydantic import SecretStr

from specdec.config import CoordinatorSettings
from specdec.coordinator.child_main import BEAT_S, SERVING_LINE, ChildInstructions
from specdec.service.listening import StartupFailed, bound_sockets
from specdec.service.process import import_path
from specdec.service.standstill import Standstill
from specdec.telemetry import forget_gauges
from specdec.wire.settings import join_address

_LATE_S = 1.5 * BEAT_S
_log = structlog.get_logger(__name__)


class CoordinatorProcess:
    """One of the supervisor's processes; `live` starts it, once or again after its end, and kills it when it hangs."""

    def __init__(
        self,
        index: int,
        settings: CoordinatorSettings,
        metrics_dir: str | None,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_change` is awaited after each change of `is_serving`."""
        self.index = index
        self.is_serving = False
        self.told_to_end = False
        self._instructions: ChildInstructions = {
            "index": index,
            "settings": settings.model_dump(),
            "metrics_dir": metrics_dir,
            "parent_pid": os.getpid(),
        }
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None

    async def live(self) -> int:
        """Run the process once; returns its exit code: negative after a signal, 1 if it could not be started.

        It dies with the supervisor, and has its own session: a terminal's Ctrl-C must not reach it twice.
        """
        environment = {**os.environ, "PYTHONPATH": import_path()}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "specdec.coordinator.child_main", str(self.index)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:  # memory or process ids are short, but the others go on
            _log.error("process_not_started", process=self.index, error=str(error))
            return 1
        if self.told_to_end:
            self._process.terminate()
        try:
            await self._instruct(self._process)
            await self._follow(self._process)
            return await self._process.wait()
        finally:
            forget_gauges(self._instructions["metrics_dir"], str(self.index))
            await self._set_serving(False)

    def terminate(self) -> None:
        """Let it drain and end; a second call ends it at once. It must not be started again."""
        self.told_to_end = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _instruct(self, process: asyncio.subprocess.Process) -> None:
        stdin = process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(as_json(self._instructions))
            await stdin.drain()
        stdin.close()

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        stdout = process.stdout
        assert stdout is not None
        standstill, loop = Standstill(), asyncio.get_running_loop()
        reading = asyncio.create_task(stdout.readline())
        try:
            while True:
                await asyncio.wait({reading}, timeout=_LATE_S)
                if reading.done():
                    if not (line := reading.result()):
                        return
                    standstill.answered()
                    reading = asyncio.create_task(stdout.readline())
                    if line == SERVING_LINE:
                        await self._set_serving(True)
                elif self.is_serving and standstill.is_hung(process.pid, loop.time()):
                    # While it lives, the kernel gives its port connections that nobody accepts.
                    _log.error("process_hung", process=self.index, pid=process.pid, silent_s=standstill.silent_s)
                    self.kill()
        finally:
            reading.cancel()

    async def _set_serving(self, is_serving: bool) -> None:
        if self.is_serving != is_serving:
            self.is_serving = is_serving
            await self._on_change()


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold a port that our processes may share and no other server can take; yields it, a free one for port 0.

    Raises StartupFailed, which names the settings, if another server has the port.
    """
    with contextlib.ExitStack() as stack:
        try:
            if port:
                # A server that also shares its port, such as another supervisor's, would not refuse us.
                for probe in bound_sockets(host, port, socket.SO_REUSEADDR):
                    probe.close()
            # These sockets never listen, so they get no connections.
            held = [
                stack.enter_context(made)
                for made in bound_sockets(host, port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
            ]
        except OSError as error:
            address = join_address(host, port)
            raise StartupFailed(f"host, port: cannot listen on {address}: {error.strerror}") from error
        yield held[0].getsockname()[1]


def as_json(instructions: object) -> bytes:
    """Encode a process's instructions, secrets included."""
    return json.dumps(instructions, default=_plain).encode()


def _plain(value: object) -> str:
    match value:
        case SecretStr():
            return value.get_secret_value()
        case Path():
            return str(value)
    raise TypeError(f"a setting of type {type(value).__name__} cannot be passed on")
