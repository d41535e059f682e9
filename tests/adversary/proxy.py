"""The proxy that all links go through, as a process: ``python -m tests.adversary.proxy``.

Commands come as lines of JSON on standard input, and each is answered with one line. It ends when its input does, so it
does not outlive who started it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from tests.adversary.proxy_link import Flow, Link
from tests.adversary.socket_owner import children_of, owner_of

HOST = "127.0.0.1"
BACKLOG = 256
UNKNOWN = "other"
"""The source of a connection that no process is known of."""


class Proxy:
    """Listens for links. One with a source is that link; one without stands for all links to a destination, which are
    told apart by the process that connects, or by its parent."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}
        self._flows: dict[str, tuple[Flow, Flow]] = {}
        self._owners: dict[int, str] = {}
        self._are_apart: dict[str, bool] = {}
        self._servers: list[asyncio.Server] = []

    async def execute(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        match command["do"]:
            case "listen":
                self._are_apart[command["destination"]] = command["is_between_hosts"]
                return {"port": await self._listen(command.get("source"), command["destination"], command["port"])}
            case "owner":
                self._owners = {pid: name for pid, name in self._owners.items() if name != command["name"]}
                self._owners[command["pid"]] = command["name"]
                return {}
            case "flow":
                flows = Flow(**command["forth"]), Flow(**command["back"])
                self._flows[command["links"]] = flows
                for link in self._matching(command["links"]):
                    link.set_flow(*flows)
                return {}
            case "heal":
                self._flows.pop(command["links"], None)
                for link in self._matching(command["links"]):
                    link.set_flow(*self._flow_of(link.name))
                return {}
            case "reset":
                return {"connections": sum(link.reset() for link in self._matching(command["links"]))}
            case "connections":
                return {"links": {name: len(link.connections) for name, link in sorted(self._links.items())}}
            case other:
                raise ValueError(f"no such command: {other}")

    def _matching(self, pattern: str) -> Iterable[Link]:
        return [link for name, link in self._links.items() if fnmatchcase(name, pattern)]

    def _flow_of(self, name: str) -> tuple[Flow, Flow]:
        """What was said last and not taken back, of the patterns that the link matches."""
        matching = [flows for pattern, flows in self._flows.items() if fnmatchcase(name, pattern)]
        return matching[-1] if matching else (Flow(), Flow())

    def _link(self, name: str, port: int) -> Link:
        link = self._links.get(name)
        if link is None:
            is_apart = self._are_apart[name.rpartition(">")[2]]
            link = self._links[name] = Link(name, (HOST, port), is_between_hosts=is_apart)
            link.set_flow(*self._flow_of(name))
        return link

    async def _listen(self, source: str | None, destination: str, port: int) -> int:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            name = source or self._owner_of(writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1])
            await self._link(f"{name}>{destination}", port).carry(reader, writer)

        if source is not None:
            self._link(f"{source}>{destination}", port)
        server = await asyncio.start_server(accept, HOST, 0, backlog=BACKLOG)
        self._servers.append(server)
        listening: int = server.sockets[0].getsockname()[1]
        return listening

    def _owner_of(self, peer_port: int, own_port: int) -> str:
        owners = {child: name for pid, name in self._owners.items() for child in (pid, *children_of(pid))}
        pid = owner_of(peer_port, own_port, list(owners))
        return UNKNOWN if pid is None else owners[pid]


async def main() -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    proxy = Proxy()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            answer = await proxy.execute(json.loads(line))
        except Exception as error:  # told to who sent the command
            answer = {"error": repr(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
