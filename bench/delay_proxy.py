"""A TCP proxy that delays bytes, in a process of its own: `python -m bench.delay_proxy`.

It listens on free ports of loopback and forwards connections to other addresses. Bytes are forwarded after the delay,
in both directions, in order. The process reads commands from standard input, answers each with one line, and ends when
standard input ends:

    before HOST:PORT [MODULE]   listen; answers the port. With a module, only connections of its processes are delayed
    delay MS                    delay bytes that arrive from now on

Engines on two hosts reach each other by no Unix socket, so the proxy spoils the sockets' names in what it delays.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

import psutil

from specdec.commands.up.service_process import MODULES, ServiceSpec

_HOST = "127.0.0.1"
_READ_BYTES = 64 * 1024
SOCKET_NAME, SPOILT = b"specdec-link-", b"specdec-none-"
"""How names of sockets between engines of one host begin, and what another host makes of them."""


class DelayProxy:
    """The proxy's process, as a context manager."""

    def __init__(self, cores: Sequence[int]) -> None:
        """Start the process on `cores`."""
        command = [sys.executable, "-m", "bench.delay_proxy", ",".join(map(str, cores))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def __enter__(self) -> DelayProxy:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def before(self, address: str, module: str = "") -> str:
        """A new address that leads to this one; `module`: only connections of its processes are delayed."""
        return f"{_HOST}:{self._tell(f'before {address} {module}')}"

    def far_drafts(self, specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        """The services with all connections of drafts delayed: from coordinators to drafts, and from drafts to targets.

        Drafts and coordinators call targets by the same address, which a coordinator tells a draft.
        """
        far = {
            spec.address: self.before(spec.address, MODULES["draft"] if spec.role == "target" else "")
            for spec in specs
            if spec.role in ("target", "draft")
        }

        def renamed(text: str) -> str:
            for address, seen_at in far.items():
                text = text.replace(address, seen_at)
            return text

        return [
            dataclasses.replace(
                spec,
                arguments=tuple(map(renamed, spec.arguments)),
                environment={name: renamed(value) for name, value in spec.environment.items()},
            )
            for spec in specs
        ]

    def delay(self, delay_ms: float) -> None:
        """Delay bytes that arrive from now on by `delay_ms`, each way."""
        self._tell(f"delay {delay_ms}")

    def _tell(self, line: str) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise OSError("the proxy has no standard input or output")
        self._process.stdin.write(f"{line}\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise OSError("the proxy has ended")
        return answer.strip()


class _Links:
    """All addresses, with one delay."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._servers: list[asyncio.Server] = []

    async def obey(self, line: str) -> str:
        """Run one command; returns its answer."""
        word, value, *module = line.split()
        if word == "delay":
            self.delay_s = float(value) / 1e3
            return "done"
        host, _, port = value.rpartition(":")

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            is_far = not module or module[0] in _command_of(writer)
            await self._carry(reader, writer, (host, int(port)), is_far)

        self._servers.append(await asyncio.start_server(carry, _HOST, 0))
        return str(self._servers[-1].sockets[0].getsockname()[1])

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: tuple[str, int], is_far: bool
    ) -> None:
        """Forward one connection until either side closes it."""
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*to)
            for end in (writer, far_writer):
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ways = ((reader, far_writer), (far_reader, writer))
            pumps = [asyncio.create_task(self._pump(*ends, is_far)) for ends in ways]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            far_writer.close()
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_far: bool) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering = asyncio.create_task(_deliver(pieces, writer))
        try:
            data = b"."
            while data:
                data = await reader.read(_READ_BYTES)
                if is_far:
                    data = data.replace(SOCKET_NAME, SPOILT)
                pieces.put_nowait((loop.time() + self.delay_s * is_far, data))
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


def _command_of(writer: asyncio.StreamWriter) -> list[str]:
    """Command line of the process that made a connection; empty if it is gone."""
    peer, own = (writer.get_extra_info(name)[1] for name in ("peername", "sockname"))
    for found in psutil.net_connections(kind="tcp"):
        if found.laddr and found.raddr and (found.laddr.port, found.raddr.port) == (peer, own) and found.pid:
            with contextlib.suppress(psutil.Error):
                return psutil.Process(found.pid).cmdline()
    return []


async def _serve() -> None:
    links = _Links()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(await links.obey(line), flush=True)


def main() -> None:
    """Serve until standard input ends."""
    if cores := [int(core) for core in sys.argv[1].split(",") if core]:
        os.sched_setaffinity(0, cores)
    # select, because epoll rounds waits up to whole milliseconds.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(_serve())


if __name__ == "__main__":
    main()
