"""A TCP proxy that delays bytes, in a process of its own: `python -m bench.delay_proxy`.

It listens on a free port of loopback and forwards connections to another address. Bytes are forwarded after the delay,
in both directions, in order. The process reads commands from standard input (`to HOST:PORT`, `delay MS`), answers each
with one line, and ends when standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

_HOST = "127.0.0.1"
_READ_BYTES = 64 * 1024


class DelayProxy:
    """The proxy's process, as a context manager."""

    def __init__(self, cores: Sequence[int]) -> None:
        """Start the process on `cores`."""
        command = [sys.executable, "-m", "bench.delay_proxy", ",".join(map(str, cores))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.address = f"{_HOST}:{self._answer()}"

    def __enter__(self) -> DelayProxy:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def lead_to(self, address: str) -> None:
        """Forward new connections to this address."""
        self._tell(f"to {address}")

    def delay(self, delay_ms: float) -> None:
        """Delay bytes that arrive from now on by `delay_ms`, each way."""
        self._tell(f"delay {delay_ms}")

    def _tell(self, line: str) -> None:
        if self._process.stdin is None:
            raise OSError("the proxy has no standard input")
        self._process.stdin.write(f"{line}\n")
        self._answer()

    def _answer(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise OSError("the proxy has ended")
        return line.strip()


class _Link:
    """Address and delay of the connections, as the commands set them."""

    def __init__(self) -> None:
        self.to = (_HOST, 0)
        self.delay_s = 0.0

    def obey(self, line: str) -> None:
        """Run one command."""
        word, _, value = line.strip().partition(" ")
        if word == "to":
            host, _, port = value.rpartition(":")
            self.to = (host, int(port))
        elif word == "delay":
            self.delay_s = float(value) / 1e3

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side closes it."""
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*self.to)
            for end in (writer, far_writer):
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, far_writer), (far_reader, writer))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            far_writer.close()
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering = asyncio.create_task(_deliver(pieces, writer))
        try:
            data = b"."
            while data:
                data = await reader.read(_READ_BYTES)
                pieces.put_nowait((loop.time() + self.delay_s, data))
            await delivering
        except OSError:
            pass
        finally:
            delivering.cancel()


async def _deliver(pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s, data = await pieces.get()
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        if not data:
            return
        writer.write(data)


async def _serve() -> None:
    link = _Link()
    server = await asyncio.start_server(link.carry, _HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        link.obey(line)
        print("done", flush=True)


def main() -> None:
    """Serve until standard input ends."""
    if cores := [int(core) for core in sys.argv[1].split(",") if core]:
        os.sched_setaffinity(0, cores)
    # select, because epoll rounds waits up to whole milliseconds.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(_serve())


if __name__ == "__main__":
    main()
