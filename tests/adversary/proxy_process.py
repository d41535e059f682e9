"""The proxy as seen by who started it."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from types import TracebackType
from typing import Any

from tests.adversary.proxy_link import PLAIN, Flow


class ProxyProcess:
    """Starts the proxy and tells it what to do. Use as an async context manager."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> ProxyProcess:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.adversary.proxy", stdin=pipe, stdout=pipe, start_new_session=True
        )
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def listen(
        self, destination: str, port: int, source: str | None = None, *, is_between_hosts: bool = False
    ) -> int:
        """Carry a link to a port of loopback; returns the port to connect to.

        Without a source it carries the links of all processes that `set_owner` tells of. With `is_between_hosts` names
        of Unix sockets lead nowhere at the other end.
        """
        answer = await self._ask(
            do="listen", source=source, destination=destination, port=port, is_between_hosts=is_between_hosts
        )
        return int(answer["port"])

    async def set_owner(self, name: str, pid: int) -> None:
        """Say which process is the source of that name."""
        await self._ask(do="owner", name=name, pid=pid)

    async def set_flow(self, links: str, *, forth: Flow = PLAIN, back: Flow = PLAIN) -> None:
        """Let the links that match a pattern, those to come too, carry so, until `heal` with the same pattern."""
        await self._ask(do="flow", links=links, forth=asdict(forth), back=asdict(back))

    async def heal(self, links: str) -> None:
        """Take back what was said of a pattern."""
        await self._ask(do="heal", links=links)

    async def reset(self, links: str) -> int:
        """Break all connections of the links; returns how many there were."""
        return int((await self._ask(do="reset", links=links))["connections"])

    async def connections(self) -> dict[str, int]:
        """Open connections by link."""
        found: dict[str, int] = (await self._ask(do="connections"))["links"]
        return found

    async def _ask(self, **command: Any) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with self._turn:
            process.stdin.write(json.dumps(command).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the proxy has ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer
